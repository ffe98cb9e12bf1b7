"""A log as it goes on: one line for each thing that happens to a request, quiet progress left out."""

from __future__ import annotations

import time
from collections.abc import Iterator

import attrs
import msgspec

from kvledger.adapters.tools.cli.output import Output
from kvledger.adapters.tools.logs.describe import describe, describe_decisions
from kvledger.adapters.tools.logs.log import Batch, Gap, StoredLog
from kvledger.adapters.tools.logs.observation import Observation, ObservationVisitor
from kvledger.adapters.tools.logs.under_way import UnderWay, under_way
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Model

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


class State(msgspec.Struct, forbid_unknown_fields=True):
    """What a feed goes on from."""

    last_lookup: dict[str, str] = {}
    """Request id → the line of its last lookup."""
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
        """The lines since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def observed(self, observation: Observation) -> None:
        """Add the lines of an observation."""
        own = getattr(observation.event, "request_id", "")
        concerning: dict[str, list[e.Event]] = {own: []}
        for _, event in observation.decisions:
            concerning.setdefault(getattr(event, "request_id", ""), []).append(event)
        for sequence, event in ((observation.sequence, observation.event), *observation.decisions):
            self.state.under_way = under_way(self._core, event, sequence, self.state.under_way)
        for request_id, decisions in concerning.items():
            text = self._text(observation.event if request_id == own else None, request_id, decisions)
            if text:
                events = (observation.event, *decisions)
                num_broken = sum(isinstance(event, e.InvariantViolated | e.HookFailed) for event in events)
                place = observation.sequence, self.moment.time_ns, request_id
                self._lines.append(Line(*place, *self.paths(request_id), text, num_broken))

    def _text(self, observation: e.Event | None, request_id: str, decisions: list[e.Event]) -> str:
        parts = [describe(observation, self._core)] if observation is not None else []
        if not any(parts):
            decisions = [decision for decision in decisions if not isinstance(decision, _QUIET)]
        text = "; ".join(filter(None, (*parts, *describe_decisions(decisions, self._core))))
        if any(isinstance(decision, e.LookupAnswered | e.LookupDeferred) for decision in decisions):
            # A waiting request is asked about at every step: only a new answer is news.
            repeated = self.state.last_lookup.get(request_id) == text
            self.state.last_lookup[request_id] = text
            return "" if repeated else text
        if isinstance(observation, e.RequestFinished):
            self.state.last_lookup.pop(request_id, None)
        return text


def follow(log: StoredLog, output: Output) -> Iterator[Batch | None]:
    """Every batch of a log, and then those that are appended; None whenever there is nothing new.

    Ends where nobody writes the log any more; a copy or a mirror, of which that is not known, is followed for ever.
    """
    place, last_sequence = (log.files()[0].name, 0), 0
    for batch in log.batches():
        place, last_sequence = (batch.segment, batch.end_offset), batch.last_sequence
        yield batch
    num_polls = 0
    while True:
        num_new, has_ended = 0, log.has_ended()  # asked first: what was written before is read below
        for batch in log.batches_from(*place):
            if last_sequence + 1 < batch.first_sequence:
                batch.gap = Gap(last_sequence + 1, batch.first_sequence - 1)
            place, last_sequence = (batch.segment, batch.end_offset), batch.last_sequence
            num_new += 1
            yield batch
        num_polls = 0 if num_new else num_polls + 1
        if num_polls == _STUCK_AFTER_POLLS and log.has_more_than(*place):
            output.remark(f"what stands at byte {place[1]} of {place[0]} cannot be read; `kvledger verify` says why")
        yield None
        if has_ended and not num_new:
            return
        time.sleep(_POLL_SECONDS)
