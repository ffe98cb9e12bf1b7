"""The story of one request, and the events it names: from the log's index where there is one, else by reading the log.

It must not tell the story: it answers what an event was, when, and whose an ordinal is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import attrs

from kvledger.adapters.logs.index import LogIndex, index_for
from kvledger.adapters.logs.log import StoredLog
from kvledger.adapters.logs.progress import Progress
from kvledger.adapters.logs.selection import Selection
from kvledger.adapters.reasons import Accounts, Story
from kvledger.lifecycle import events as e


@attrs.frozen
class Witness:
    """An event that is part of a story. `time_ns` since the log was opened; a decision has that of its cause."""

    sequence: int
    event: e.Event
    time_ns: int


@attrs.frozen
class Told:
    """All lives of one request id, what they name, and the names of the other requests."""

    stories: tuple[Story, ...]
    witnesses: Mapping[int, Witness]
    names: Mapping[int, str]
    """Ordinal -> request id, of the requests that got blocks when this one lost its own."""

    def time_ns(self, sequence: int) -> int | None:
        """When an event happened, if the log has it."""
        witness = self.witnesses.get(sequence)
        return None if witness is None else witness.time_ns


def tell(log: StoredLog, selection: Selection, request_id: str, output: Progress) -> Told:
    """The stories of a request, as far as the selection reaches. What came before the selection counts, too."""
    index = index_for(log, output, request_id) if selection.last_sequence is None else None
    if index is not None:
        with contextlib.closing(index):
            if index.contents.is_whole:
                log.damage[:] = index.contents.damage
                return _from_index(index, request_id)
    with output.progress(log, "finding the reasons"):
        stories = _fold(log, selection, request_id)
    with output.progress(log, "finding the events"):
        return _from_log(log, stories)


def _from_index(index: LogIndex, request_id: str) -> Told:
    stories = tuple(index.stories(request_id))
    witnesses = {number: Witness(number, event, at_ns) for number, event, at_ns in index.named(named_by(stories))}
    names = {ordinal: index.request_of(ordinal) for ordinal in _ordinals(witnesses)}
    return Told(stories, witnesses, names)


def _fold(log: StoredLog, selection: Selection, request_id: str) -> tuple[Story, ...]:
    ended: list[Story] = []
    accounts = Accounts(log.configuration, request_id=request_id, on_end=ended.append, keeps_stories=True)
    for batch in log.batches(selection.last_sequence):
        if batch.gap is not None:
            accounts.lose()
        for sequence, event in batch.numbered():
            accounts.take(sequence, event)
    return (*ended, *accounts.stories)


def _from_log(log: StoredLog, stories: tuple[Story, ...]) -> Told:
    wanted = named_by(stories)
    witnesses: dict[int, Witness] = {}
    names: dict[int, str] = {}
    last = max(wanted, default=0)
    for batch in log.batches(last):
        for sequence, event, time_ns in batch.timed():
            if sequence in wanted:
                witnesses[sequence] = Witness(sequence, event, time_ns)
            if isinstance(event, e.RequestArrived):
                names[event.ordinal] = event.request_id
    ordinals = _ordinals(witnesses)
    return Told(stories, witnesses, {ordinal: name for ordinal, name in names.items() if ordinal in ordinals})


def _ordinals(witnesses: Mapping[int, Witness]) -> set[int]:
    steps = (witness.event for witness in witnesses.values() if isinstance(witness.event, e.StepScheduled))
    return {ordinal for step in steps for ordinal, _ in step.extended}


def named_by(stories: tuple[Story, ...]) -> set[int]:
    """The numbers of all events that the stories name."""
    named: set[int] = set()
    for story in stories:
        named.update(story.moments)
        for lookup in story.lookups:
            named.update((lookup.first_sequence, lookup.last_sequence))
            named.update(number for span in lookup.spans for number in span.evidence)
        for admission in story.admissions:
            named.update((admission.sequence, admission.answer_sequence))
            named.update(number for span in (*admission.spans, *admission.missed) for number in span.evidence)
        for recomputation in story.recomputations:
            named.add(recomputation.sequence)
            named.update(number for span in recomputation.spans for number in span.evidence)
    named.discard(0)
    return named
