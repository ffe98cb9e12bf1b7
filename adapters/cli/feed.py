"""A log as it goes on: one line for each thing that happens to a request, quiet progress left out."""

from __future__ import annotations

import time
from collections.abc import Iterator

import attrs

from kvledger.adapters.cli.output import Output
from kvledger.adapters.logs.describe import describe, describe_decisions
from kvledger.adapters.logs.ending import num_open_requests
from kvledger.adapters.logs.log import Batch, StoredLog
from kvledger.adapters.logs.under_way import UnderWay, under_way
from kvledger.lifecycle import Core, LedgerConfiguration, Projections
from kvledger.lifecycle import events as e

_QUIET = (e.SaveIssued, e.SaveCompleted, e.PrefillAdvanced, e.PrefillCompleted, e.ChunkTainted)
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
    """Folds a log and tells each observation once the next one has come, or `flush` is called."""

    def __init__(self, core: Core, configuration: LedgerConfiguration) -> None:
        self.under_way: UnderWay | None = None
        """What is under way behind the last event."""
        self._core = core
        self._projections = Projections(core, configuration)
        self._sequence = 0
        self._observation: e.Event | None = None
        self._decisions: dict[str, list[e.Event]] = {}
        self._states: dict[str, str | None] = {}
        self._last_lookup: dict[str, str] = {}

    def take(self, sequence: int, event: e.Event) -> Iterator[Line]:
        """Take up an event; tell the observation before it if this is the next."""
        if not event.is_decision:
            yield from self.flush()
            self._sequence, self._observation = sequence, event
        request_id = getattr(event, "request_id", "")
        self._states.setdefault(request_id, self._state(request_id))
        if event.is_decision:
            self._decisions.setdefault(request_id, []).append(event)
        self._projections.fold(event, sequence)
        self.under_way = under_way(self._core, event, sequence, self.under_way)

    def take_all(self, batch: Batch) -> Iterator[Line]:
        """Take up a batch."""
        for sequence, event in batch.numbered():
            yield from self.take(sequence, event)

    @property
    def num_open_requests(self) -> int:
        """The requests that had not finished so far."""
        return num_open_requests(self._projections)

    def flush(self) -> Iterator[Line]:
        """Tell what has been taken up and not told: its decisions are all there, for a frame holds them together."""
        observation, self._observation = self._observation, None
        decisions, self._decisions = self._decisions, {}
        states, self._states = self._states, {}
        if observation is None:
            return
        own = getattr(observation, "request_id", "")
        for request_id in dict.fromkeys((own, *decisions)):
            concerning = decisions.get(request_id, [])
            text = self._text(observation if request_id == own else None, request_id, concerning)
            if text:
                yield Line(
                    self._sequence,
                    getattr(observation, "time_ns", self._projections.tracker.time_ns),
                    request_id,
                    states.get(request_id),
                    self._state(request_id),
                    text,
                    sum(isinstance(event, e.InvariantViolated | e.HookFailed) for event in (observation, *concerning)),
                )

    def _text(self, observation: e.Event | None, request_id: str, decisions: list[e.Event]) -> str:
        told = describe(observation, self._core) if observation is not None else ""
        loud = [decision for decision in decisions if not isinstance(decision, _QUIET)]
        text = "; ".join(([told] if told else []) + describe_decisions(loud if not told else decisions, self._core))
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
