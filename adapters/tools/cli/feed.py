"""Follows a log: makes one line for everything that happens to a request, except progress of saves and prefill."""

from __future__ import annotations

import time
from collections.abc import Iterator

import attrs
import msgspec

from kvledger.adapters.tools.cli.output import Output
from kvledger.adapters.tools.logs.describe import describe, describe_decisions, without_numbers
from kvledger.adapters.tools.logs.log import Batch, Gap, StoredLog
from kvledger.adapters.tools.logs.observation import Observation, ObservationVisitor
from kvledger.adapters.tools.logs.under_way import UnderWay, under_way
from kvledger.adapters.units import duration, plural
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Model

_QUIET = (e.SaveIssued, e.SaveCompleted, e.PrefillAdvanced, e.PrefillCompleted, e.ChunksTainted)
"""Decisions that get no line of their own."""
_POLL_SECONDS = 0.2
_STUCK_AFTER_POLLS = 25


@attrs.frozen
class Line:
    """Effect of one observation on one request. `request_id` is empty if the observation concerns no single request."""

    first_sequence: int
    time_ns: int
    request_id: str
    state_before: str | None
    state_after: str | None
    text: str
    num_broken: int


class Polls(msgspec.Struct, forbid_unknown_fields=True):
    """Consecutive lookups of one request whose answers differ only in numbers."""

    first_text: str
    last_text: str
    last_sequence: int
    first_ns: int
    last_ns: int
    num_repeats: int = 0

    @property
    def repeats_text(self) -> str:
        """The repetitions of the first lookup in words: how many, and with which answer."""
        text = f"looked up {plural(self.num_repeats, 'more time')} in {duration(self.last_ns - self.first_ns)}"
        return (
            f"{text}; the last: {self.last_text}" if self.last_text != self.first_text else f"{text}: the same answer"
        )


class State(msgspec.Struct, forbid_unknown_fields=True):
    """State that a `Feed` keeps from one observation to the next."""

    polls: dict[str, Polls] = {}
    """Request id → the latest lookups of this request."""
    under_way: UnderWay | None = None


class Feed(ObservationVisitor):
    """Makes a line for each request that an observation concerns."""

    state: State

    def __init__(self, model: Model, core: Core) -> None:
        super().__init__(model)
        self.state = State()
        self._core = core
        self._lines: list[Line] = []

    def pop_lines(self) -> list[Line]:
        """Return the lines that were added since the previous call of this method."""
        lines, self._lines = self._lines, []
        return lines

    def observed(self, observation: Observation) -> None:
        """Add one line for each request that the observation concerns."""
        own = getattr(observation.event, "request_id", "")
        concerning: dict[str, list[e.Event]] = {own: []}
        for _, event in observation.decisions:
            concerning.setdefault(getattr(event, "request_id", ""), []).append(event)
        for sequence, event in ((observation.sequence, observation.event), *observation.decisions):
            self.state.under_way = under_way(self._core, event, sequence, self.state.under_way)
        for request_id, decisions in concerning.items():
            text = self._text(observation.event if request_id == own else None, decisions)
            has_answer = any(isinstance(decision, e.LookupAnswered | e.LookupDeferred) for decision in decisions)
            events = (observation.event, *decisions)
            num_broken = sum(isinstance(event, e.InvariantViolated | e.HookFailed) for event in events)
            is_poll = has_answer and not num_broken  # what is broken is never left out
            if text and not (is_poll and self._repeats(request_id, text, observation.sequence)):
                if not is_poll:
                    self._end_polls(request_id)
                place = observation.sequence, self.moment.time_ns, request_id
                self._lines.append(Line(*place, *self.paths(request_id), text, num_broken))

    def _text(self, observation: e.Event | None, decisions: list[e.Event]) -> str:
        parts = [describe(observation, self._core)] if observation is not None else []
        if not any(parts):
            decisions = [decision for decision in decisions if not isinstance(decision, _QUIET)]
        return "; ".join(filter(None, (*parts, *describe_decisions(decisions, self._core))))

    def _repeats(self, request_id: str, text: str, sequence: int) -> bool:
        """Whether a lookup got the same answer as the request's previous lookup, apart from numbers.

        A lookup with the same answer is counted and gets no line, because vLLM looks up a waiting request in every
        step.
        """
        polls, now_ns = self.state.polls.get(request_id), self.moment.time_ns
        if polls is not None and without_numbers(polls.last_text) == without_numbers(text):
            polls.last_text, polls.last_ns, polls.last_sequence = text, now_ns, sequence
            polls.num_repeats += 1
            return True
        self._end_polls(request_id)
        self.state.polls[request_id] = Polls(text, text, sequence, now_ns, now_ns)
        return False

    def _end_polls(self, request_id: str) -> None:
        """Add a line for the repeated lookups of a request, if there are any. Called before the request's next line."""
        polls = self.state.polls.pop(request_id, None)
        if polls is not None and polls.num_repeats:
            state, _ = self.paths(request_id)
            self._lines.append(
                Line(polls.last_sequence, polls.last_ns, request_id, state, state, polls.repeats_text, 0)
            )


def follow(log: StoredLog, output: Output) -> Iterator[Batch | None]:
    """Yield every frame of a log after the event `log.start_sequence`, then each frame that is appended later.

    Yields None each time it reaches the present end of the log. Ends when no process writes the log any more. A copy
    or a mirror of a log does not show whether a process writes the log, so this function never ends for them.
    """
    place, last_sequence = (log.files()[0].name, 0), log.start_sequence
    for batch in log.batches_behind(last_sequence) if last_sequence else log.batches():
        place, last_sequence = (batch.segment, batch.end_offset), batch.last_sequence
        yield batch
    num_polls = 0
    while True:
        num_new, has_ended = 0, log.has_ended()  # checked first, so that everything written before is read below
        for batch in log.batches_from(*place):
            if last_sequence + 1 < batch.first_sequence:
                batch.gap = Gap(last_sequence + 1, batch.first_sequence - 1)
            place, last_sequence = (batch.segment, batch.end_offset), batch.last_sequence
            num_new += 1
            yield batch
        num_polls = 0 if num_new else num_polls + 1
        if num_polls == _STUCK_AFTER_POLLS and log.has_more_than(*place):
            output.remark(f"{place[0]} cannot be read at byte {place[1]}; `kvledger verify` reports why")
        yield None
        if has_ended and not num_new:
            return
        time.sleep(_POLL_SECONDS)
