"""The measured costs of loading a token from the host pool and of computing it, in nanoseconds per token.

Both costs are measured from the log alone. Each report of a load contains the load's duration. The cost of computing is
the least-squares slope of step duration over tokens, with its standard error. While loading costs more than computing,
loads are not worth offering; now and then, one is tried. This module must not know the decisions that use the costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections.base import Projection, Subject
from kvledger.lifecycle.ranges import DurationNs, Int64, JobId, NumTokens, SumOfTokens, TimeNs
from kvledger.lifecycle.states import RequestState

if TYPE_CHECKING:
    from kvledger.lifecycle.projections.tracker import RequestTracker

NUM_STEPS = 8
"""Steps per sample. With two steps in flight, a step's cost shows in the duration of the next; a sum evens it out."""
MAX_SAMPLES = 64
MIN_SAMPLES = 8
MIN_LOADS = 8
"""Loads to measure before loads may be declined. While loads are declined, one measured trial load decides again."""
NUM_ERRORS = 2
"""Standard errors by which computing may be slower than measured.

On a busy machine the measured cost of a token was between nothing and ten times its true cost, and loads that took a
fifth of the true cost were refused.
"""
MARGIN = 5, 4
"""Loads are declined if they cost more than 5/4 of computing, and offered again if they cost less than 4/5."""
PAUSE_NS = 10_000_000_000
"""Nanoseconds after which one load is tried while loads are declined."""

_COMPUTING = (RequestState.CHUNKED_PREFILL, RequestState.RUNNING)


class State(msgspec.Struct, forbid_unknown_fields=True):
    """The measurements, and the time until which no load is offered because of them."""

    samples: list[tuple[SumOfTokens, Int64]] = []
    """(sum of tokens, duration in nanoseconds) of each series of `NUM_STEPS` steps, the oldest first."""
    steps: list[tuple[NumTokens, TimeNs]] = []
    """(tokens, time of scheduling) of the steps that are in no sample yet. A sample ends when the next step is
    scheduled."""
    loading: dict[JobId, tuple[NumTokens, bool]] = {}
    """Job id of a load in flight → (tokens of the load, whether a step waits for the load)."""
    loads: list[tuple[NumTokens, DurationNs]] = []
    """(tokens, nanoseconds) of the loads since the last comparison of the costs."""
    declined_until_ns: Int64 | None = None
    """Time in nanoseconds until which no load is offered. Then one load is tried. None: all loads are offered."""


class TokenCosts(Projection):
    """Measures the costs from steps and loads.

    It may fold a step before or after the tracker, because a step does not change which requests compute.
    """

    def __init__(self, tracker: RequestTracker) -> None:
        self._tracker = tracker
        self.state = State()

    def is_slower(self, time_ns: int) -> bool:
        """Whether loading is known to take longer than computing, and it is too early to try a load again."""
        until_ns = self.state.declined_until_ns
        return until_ns is not None and time_ns < until_ns

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled, _sequence: int, _subject: Subject) -> None:
        state = self.state
        steps = state.steps
        if not any(record.state in _COMPUTING for record in self._tracker):
            steps.clear()  # the engine was idle for an unknown time
        if len(steps) == NUM_STEPS:
            state.samples.append((sum([tokens for tokens, _ in steps]), event.time_ns - steps[0][1]))
            del state.samples[:-MAX_SAMPLES]
            steps.clear()
        if any(holds_up for _, holds_up in state.loading.values()):
            steps.clear()
        else:
            steps.append((event.num_scheduled_tokens, event.time_ns))

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued, _sequence: int, _subject: Subject) -> None:
        self.state.loading[event.job_id] = event.num_tokens, not event.is_async
        if not event.is_async:
            self.state.steps.clear()
        if self.state.declined_until_ns is not None:  # this is the trial load; others wait for its result
            self.state.declined_until_ns = self._tracker.time_ns + PAUSE_NS

    @on(e.LoadCompleted, e.LoadFailed)
    def _load_settled(self, event: e.LoadCompleted | e.LoadFailed, _sequence: int, _subject: Subject) -> None:
        self.state.loading.pop(event.job_id, None)

    @on(e.TransferReported)
    def _reported(self, event: e.TransferReported, _sequence: int, _subject: Subject) -> None:
        for job_id in event.job_ids:
            num_tokens, _ = self.state.loading.pop(job_id, (0, False))
            if num_tokens and event.duration_ns and not event.ranks_failed:
                self._add(num_tokens, event)

    def _add(self, num_tokens: int, event: e.TransferReported) -> None:
        state = self.state
        state.loads.append((num_tokens, event.duration_ns))
        if state.declined_until_ns is not None or len(state.loads) == MIN_LOADS:
            state.declined_until_ns = event.time_ns + PAUSE_NS if self._costs_more() else None
            state.loads.clear()

    def _costs_more(self) -> bool:
        """Whether loading costs so much more than computing that loads should not be offered; see `MARGIN`.

        The comparison adds `NUM_ERRORS` standard errors to the measured cost of computing.
        """
        loads, samples = self.state.loads, self.state.samples
        count = len(samples)
        if count < MIN_SAMPLES:
            return False
        tokens, ns = sum(pair[0] for pair in samples), sum(pair[1] for pair in samples)
        grows = count * sum(pair[0] * pair[1] for pair in samples) - tokens * ns
        spread = count * sum(pair[0] ** 2 for pair in samples) - tokens**2
        scatter = count * sum(pair[1] ** 2 for pair in samples) - ns**2
        more, less = MARGIN if self.state.declined_until_ns is None else MARGIN[::-1]
        loaded = more * sum(pair[0] for pair in loads)
        # The slope is grows / spread, its squared error (scatter * spread - grows ** 2) / (spread ** 2 * (count - 2)).
        excess = less * sum(pair[1] for pair in loads) * spread - loaded * grows
        error = scatter * spread - grows**2
        return spread > 0 and grows > 0 and excess > 0 and excess**2 * (count - 2) > NUM_ERRORS**2 * loaded**2 * error
