"""The costs of loading and of computing a token, measured from the log. If loading is slower, no loads are offered.

`Costs` must fold a step before `Lives` does, because it needs the states that lives had before the step.
"""

from __future__ import annotations

from fractions import Fraction
from statistics import mean

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.lives import Lives
from kvledger.lifecycle.reader.moment import Moment
from kvledger.lifecycle.states import RequestState

STEPS_IN_A_ROW = 8
SAMPLES = range(8, 64 + 1)
LOADS_AT_FIRST = 8
GIVEN_UP, TAKEN_UP = Fraction(5, 4), Fraction(4, 5)
"""Cost of loading divided by cost of computing. Loads stop above the first ratio, and start again below the second."""
STANDARD_ERRORS = 2
TRIED_AFTER_NS = 10_000_000_000


class Measured(msgspec.Struct, forbid_unknown_fields=True):
    """Measurements so far. Times are in nanoseconds."""

    steps: list[tuple[int, int]] = []
    """(tokens, time of scheduling) of consecutive steps, until `STEPS_IN_A_ROW` of them become a sample."""
    samples: list[tuple[int, int]] = []
    """(tokens, duration) of each measured run of `STEPS_IN_A_ROW` steps. Only the latest runs are kept."""
    loads: list[tuple[int, int]] = []
    """(tokens, duration) of loads since the costs were last compared."""
    issued: dict[int, tuple[int, bool]] = {}
    """Job id of an unreported load → (tokens of the load, whether a step waits for the load)."""
    declined_until_ns: int | None = None
    """Time until which no load is offered; None if loads are offered."""
    is_slower: bool = False


class Costs:
    """Measures steps and loads."""

    def __init__(self, lives: Lives, moment: Moment) -> None:
        self._lives = lives
        self._moment = moment
        self.state = Measured()

    @property
    def is_slower(self) -> bool:
        """Whether loading counted as slower than computing at the time of the last lookup."""
        return self.state.is_slower

    @on(e.LookupRequested)
    def _requested(self, event: e.LookupRequested) -> None:
        declined_until_ns = self.state.declined_until_ns
        self.state.is_slower = declined_until_ns is not None and event.time_ns < declined_until_ns

    @on(e.StepScheduled)
    def _step(self, event: e.StepScheduled) -> None:
        computing = {RequestState.CHUNKED_PREFILL, RequestState.RUNNING}
        state = self.state
        if not any(life.state in computing for life in self._lives):
            state.steps = []
        if len(state.steps) == STEPS_IN_A_ROW:
            state.samples.append((sum(tokens for tokens, _ in state.steps), event.time_ns - state.steps[0][1]))
            del state.samples[: -SAMPLES.stop + 1]
            state.steps = []
        if any(holds_up for _, holds_up in state.issued.values()):
            state.steps = []
        else:
            state.steps.append((event.num_scheduled_tokens, event.time_ns))

    @on(e.LoadIssued)
    def _issue(self, event: e.LoadIssued) -> None:
        self.state.issued[event.job_id] = event.num_tokens, not event.is_async
        if not event.is_async:
            self.state.steps = []
        if self.state.declined_until_ns is not None:
            self.state.declined_until_ns = self._moment.time_ns + TRIED_AFTER_NS

    @on(e.LoadCompleted, e.LoadFailed)
    def _settled(self, event: e.LoadCompleted | e.LoadFailed) -> None:
        self.state.issued.pop(event.job_id, None)

    @on(e.TransferReported)
    def _reported(self, event: e.TransferReported) -> None:
        for job_id in event.job_ids:
            num_tokens, _ = self.state.issued.pop(job_id, (0, False))
            if num_tokens and event.duration_ns and not event.ranks_failed:
                self._judge(num_tokens, event)

    def _judge(self, num_tokens: int, event: e.TransferReported) -> None:
        self.state.loads.append((num_tokens, event.duration_ns))
        is_declined = self.state.declined_until_ns is not None
        if is_declined or len(self.state.loads) == LOADS_AT_FIRST:
            bound = TAKEN_UP if is_declined else GIVEN_UP
            loading = Fraction(sum(time for _, time in self.state.loads), sum(tokens for tokens, _ in self.state.loads))
            is_slower = self._is_surely_less(loading / bound)
            self.state.declined_until_ns = event.time_ns + TRIED_AFTER_NS if is_slower else None
            self.state.loads = []

    def _is_surely_less(self, loading: Fraction) -> bool:
        """Whether computing a token certainly costs less than `loading` nanoseconds.

        The cost of computing a token is the slope of a least-squares fit of durations over tokens. The slope must be
        lower than `loading` by more than `STANDARD_ERRORS` standard errors. Returns False if there are too few samples,
        if all samples have the same number of tokens, or if durations do not grow with tokens.
        """
        if len(self.state.samples) not in SAMPLES:
            return False
        samples = [(Fraction(tokens), Fraction(time)) for tokens, time in self.state.samples]
        middle, mean_time = mean(tokens for tokens, _ in samples), mean(time for _, time in samples)
        spread = sum((tokens - middle) ** 2 for tokens, _ in samples)
        if not spread:
            return False
        slope = sum((tokens - middle) * (time - mean_time) for tokens, time in samples) / spread
        residuals = [time - mean_time - slope * (tokens - middle) for tokens, time in samples]
        squared_error = sum(residual**2 for residual in residuals) / (len(samples) - 2) / spread
        return 0 < slope < loading and (loading - slope) ** 2 > STANDARD_ERRORS**2 * squared_error
