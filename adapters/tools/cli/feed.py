"""A log as it goes on: one line for each thing that happens to a request, quiet progress left out."""

from __future__ import annotations

import time
from collections.abc import Iterator

import attrs

from kvledger.adapters.tools.cli.output import Output
from kvledger.adapters.tools.logs.describe import describe, describe_decisions
from kvledger.adapters.tools.logs.ending import num_open_requests
from kvledger.adapters.tools.logs.log import Batch, StoredLog
from kvledger.adapters.tools.logs.observation import Observation
from kvledger.adapters.tools.logs.under_way import UnderWay, under_way
from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle import events as e

_QUIET = (e.SaveIssued, e.SaveCompleted, e.PrefillAdvanced, e.PrefillCompleted, e.ChunksTainted)
"""Decisions that alone do not deserve a line."""
_POLL_SECONDS = 0.2
_STUCK_AFTER_POLLS = 25


@attrs.frozen
class Line:
    """What one observation did to one request, or to all (an empty `request_id`)."""

    first_sequence: int
    time_ns: int
    request_id: str
    state_before: str | None
    state_after: str | None
    text: str
    num_broken: int


class Feed:
    """Folds a log and gives a line for each request that an observation concerns."""

    def __init__(self, core: Core, configuration: LedgerConfiguration) -> None:
        self.under_way: UnderWay | None = None
        """What is under way behind the last event."""
        self._core = core
        self._projections = core.new_projections(configuration)
        self._last_lookup: dict[str, str] = {}

    @property
    def num_open_requests(self) -> int:
        """The requests that had not finished so far."""
        return num_open_requests(self._projections)

    def take(self, observation: Observation) -> Iterator[Line]:
        """Take the next observation."""
        own = getattr(observation.event, "request_id", "")
        decisions: dict[str, list[e.Event]] = {own: []}
        for _, event in observation.decisions:
            decisions.setdefault(getattr(event, "request_id", ""), []).append(event)
        states = {request_id: self._state(request_id) for request_id in decisions}
        if isinstance(observation.event, e.RequestArrived):
            states[own] = None  # that is the state of the life before
        for sequence, event in observation:
            self._projections.fold(event, sequence)
            self.under_way = under_way(self._core, event, sequence, self.under_way)
        if observation.event.is_decision:
            return
        time_ns = getattr(observation.event, "time_ns", self._projections.tracker.time_ns)
        for request_id, concerning in decisions.items():
            text = self._text(observation.event if request_id == own else None, request_id, concerning)
            if text:
                num_broken = sum(
                    isinstance(event, e.InvariantViolated | e.HookFailed) for event in (observation.event, *concerning)
                )
                state = self._state(request_id)
                yield Line(observation.sequence, time_ns, request_id, states[request_id], state, text, num_broken)

    def _text(self, observation: e.Event | None, request_id: str, decisions: list[e.Event]) -> str:
        parts = [describe(observation, self._core)] if observation is not None else []
        if not any(parts):
            decisions = [decision for decision in decisions if not isinstance(decision, _QUIET)]
        text = "; ".join(filter(None, (*parts, *describe_decisions(decisions, self._core))))
        if any(isinstance(decision, e.LookupAnswered | e.LookupDeferred) for decision in decisions):
            # A waiting request is asked about at every step: only a new answer is news.
            repeated = self._last_lookup.get(request_id) == text
            self._last_lookup[request_id] = text
            return "" if repeated else text
        if isinstance(observation, e.RequestFinished):
            self._last_lookup.pop(request_id, None)
        return text

    def _state(self, request_id: str) -> str | None:
        record = self._projections.tracker.get(request_id)
        return None if record is None else record.path


def follow(log: StoredLog, output: Output) -> Iterator[Batch | None]:
    """Every batch of a log, and then those that are appended; None whenever there is nothing new.

    Ends where nobody writes the log any more; a copy or a mirror, of which that is not known, is followed for ever.
    """
    place = (log.files()[0].name, 0)
    for batch in log.batches():
        place = (batch.segment, batch.end_offset)
        yield batch
    num_polls = 0
    while True:
        num_new, has_ended = 0, log.has_ended()  # asked first: what was written before is read below
        for batch in log.batches_from(*place):
            place = (batch.segment, batch.end_offset)
            num_new += 1
            yield batch
        num_polls = 0 if num_new else num_polls + 1
        if num_polls == _STUCK_AFTER_POLLS and log.has_more_than(*place):
            output.remark(f"what stands at byte {place[1]} of {place[0]} cannot be read; `kvledger verify` says why")
        yield None
        if has_ended and not num_new:
            return
        time.sleep(_POLL_SECONDS)
