"""The history of one request, and the events to which the history refers.

Both come from the log's index. Without an index, the log is read twice: first for the history, then for these events.
The reason is that a history is complete only at the end of the log.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs

from kvledger.adapters.tools.logs.index import LogIndex, index_for
from kvledger.adapters.tools.logs.log import Batch, StoredLog
from kvledger.adapters.tools.logs.progress import Progress
from kvledger.adapters.tools.logs.reading import begin_accounts, begin_model, take_batch
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.reasons import RequestHistory
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Reader


@attrs.frozen
class NamedEvent:
    """An event to which a history refers.

    `time_ns` is the time since the log was opened. A decision has the time of the observation that caused it.
    """

    sequence: int
    event: e.Event
    time_ns: int


@attrs.frozen
class Histories:
    """The history of each life of one request id, and the events to which these histories refer."""

    of_lives: Sequence[RequestHistory]
    events: Mapping[int, NamedEvent]
    names: Mapping[int, str]
    """Ordinal → request id, at least for requests that got blocks in a step to which the histories refer."""

    def time_ns(self, sequence: int) -> int | None:
        """Return the time of an event; None if no history refers to the event."""
        named = self.events.get(sequence)
        return None if named is None else named.time_ns


def read_histories(log: StoredLog, selection: Selection, request_id: str, output: Progress) -> Histories:
    """Return the histories of a request up to the end of the selection.

    Events before the selection are read, too, because they can be the reason why tokens were computed.
    """
    index = index_for(log, output, request_id) if selection.last_sequence is None else None
    if index is not None:
        with contextlib.closing(index):
            if index.contents.is_whole:
                index.contents.copy_counts(log)
                return _from_index(index, request_id)
    with output.progress(log, "finding the reasons"):
        histories: list[RequestHistory] = []
        model = begin_model(log)
        accounts = begin_accounts(log, model, request_id=request_id, on_end=histories.append)
        reader = Reader(model, [accounts])
        for batch in log.batches(selection.last_sequence):
            take_batch(reader, log, batch)
        histories += accounts.histories
    damage = tuple(log.damage)
    named = NamedEvents(named_by(histories))
    with output.progress(log, "finding the events"):
        for batch in log.batches(max(named.numbers, default=0)):
            named.take(batch)
    log.damage[:] = damage  # the second reading ended early and did not see all damage
    return Histories(histories, named.events, named.names)


def _from_index(index: LogIndex, request_id: str) -> Histories:
    histories = index.histories(request_id)
    events = {number: NamedEvent(number, event, at_ns) for number, event, at_ns in index.named(named_by(histories))}
    steps = (named.event for named in events.values() if isinstance(named.event, e.StepScheduled))
    return Histories(
        histories, events, {ordinal: index.request_of(ordinal) for step in steps for ordinal, _ in step.extended}
    )


@attrs.frozen
class NamedEvents:
    """Collects the events whose numbers are in `numbers`. Pass every batch to `take`."""

    numbers: Collection[int]
    events: dict[int, NamedEvent] = attrs.field(factory=dict)
    names: dict[int, str] = attrs.field(factory=dict)
    """Ordinal → request id."""

    def take(self, batch: Batch) -> None:
        """Take the next batch of the log."""
        for sequence, event, time_ns in batch.timed():
            if sequence in self.numbers:
                self.events[sequence] = NamedEvent(sequence, event, time_ns)
            if isinstance(event, e.RequestArrived):
                self.names[event.ordinal] = event.request_id


def named_by(histories: Iterable[RequestHistory]) -> set[int]:
    """Return the sequence numbers of all events to which the histories refer."""
    named: set[int] = set()
    for history in histories:
        named.update(history.moments)
        for lookup in history.lookups:
            named.update((lookup.first_sequence, lookup.last_sequence))
        for admission in history.admissions:
            named.update((admission.sequence, admission.answer_sequence))
        named.update(again.sequence for again in history.recomputations)
        of_entries = (
            *(lookup.spans for lookup in history.lookups),
            *((*admission.spans, *admission.not_loaded, *admission.missed) for admission in history.admissions),
            *(again.spans for again in history.recomputations),
        )
        named.update(number for spans in of_entries for span in spans for number in span.evidence)
    named.discard(0)
    return named
