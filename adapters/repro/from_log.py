"""From a log's events to a recording. It knows events only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

from kvledger.adapters.recorder.extension import Recorder
from kvledger.adapters.recorder.said import CHILD, Began, Transferred, TransferredFor
from kvledger.adapters.repro.guesses import with_guesses
from kvledger.adapters.repro.recording import (
    JOB_ISSUED,
    NotReenactable,
    Recorded,
    Recording,
    ended_transfers,
    reported_by_workers,
)
from kvledger.lifecycle import LedgerConfiguration
from kvledger.lifecycle import events as e

_Said = TypeVar("_Said")


def record(configuration: LedgerConfiguration, events: Iterable[Recorded]) -> Recording:
    """A recording of these events of a log, decisions included, in order and without a gap."""
    events = list(events)
    wrapped = next((told for _, event in events if (told := _recorded(event, Began)) is not None), None)
    if wrapped is not None:
        return _of_recorder(configuration, events, wrapped)
    observations: list[Recorded] = []
    jobs: dict[int, tuple[int, str]] = {}
    answers: dict[int, int | None] = {}
    for sequence, event in events:
        if isinstance(event, e.PagesDigested):  # what pages held cannot be made again
            continue
        if not event.is_decision:
            observations.append((sequence, event))
        elif isinstance(event, JOB_ISSUED):
            jobs[event.job_id] = (event.cause, event.request_id)
        elif isinstance(event, e.LookupAnswered) and event.num_external_tokens:
            answers[event.cause] = event.num_external_tokens
    recording = Recording(
        configuration,
        tuple(observations),
        jobs,
        answers,
        speculates=_speculates(observations),
        zeroes_new_blocks=_zeroes(observations),
    )
    return with_guesses(recording)


_DONE_AGAIN = (
    *(e.EffectsDelivered, e.ExtensionObserved, e.HookFailed, e.LogNote, e.TransferReported),
    e.PagesDigested,
)
"""What a recorder writes of what the wrapped connector and its workers did."""


def _of_recorder(configuration: LedgerConfiguration, events: Sequence[Recorded], wrapped: Began) -> Recording:
    """What vLLM asked of a wrapped connector and what its workers reported, without what it made of that."""
    observations: list[Recorded] = []
    answers: dict[int, int | None] = {}
    copies: dict[str, tuple[str, bool, int]] = {}
    counts: Counter[tuple[str, bool]] = Counter()
    asked: dict[str, int] = {}
    completed: set[str] = set()
    for sequence, event in events:
        if isinstance(event, e.LookupRequested):
            asked[event.request_id] = sequence
        elif isinstance(event, e.LookupAnswered | e.LookupDeferred):
            answer = event.num_external_tokens if isinstance(event, e.LookupAnswered) else None
            if answer != 0:
                answers[asked[event.request_id]] = answer
        copy = transferred(event)
        if copy is not None and copy[1].job not in copies:
            request_id, is_load = copy[0], copy[1].is_load
            copies[copy[1].job] = (request_id, is_load, counts[request_id, is_load])
            counts[request_id, is_load] += 1
        reported = reported_by_workers(event)
        if reported is not None and reported.unread:
            raise NotReenactable(
                f"what the workers reported in event {sequence} is not known: {reported.unread}; add its decoder to "
                "kvledger.adapters.recorder.decoders, and the way back to kvledger.adapters.repro.workers"
            )
        if _is_child(event):
            raise NotReenactable(
                "the recorder stood inside of MultiConnector, whose other children's reports are in its log as well; "
                "put the recorder around MultiConnector, or around the connector alone"
            )
        ended = ended_transfers(event)
        completed.update(ended)
        if (
            reported is not None
            or ended
            or not (event.is_decision or isinstance(event, (*_DONE_AGAIN, e.ExtensionNoted)))
        ):
            observations.append((sequence, event))
    return Recording(
        configuration,
        tuple(observations),
        answers=answers,
        speculates=_speculates(observations),
        wrapped=wrapped,
        copies={job: of for job, of in copies.items() if job in completed},
    )


def _is_child(event: e.Event) -> bool:
    return isinstance(event, e.LogNote) and event.text.startswith(CHILD)


def transferred(event: e.Event) -> tuple[str, Transferred] | None:
    """(request, copy) where an event is about a copy of a wrapped connector."""
    copy = _recorded(event, Transferred)
    if copy is not None and isinstance(event, e.ExtensionObserved):
        return event.request_id, copy
    of_ended = _recorded(event, TransferredFor)
    return None if of_ended is None else (of_ended.request_id, of_ended.copy)


def _recorded(event: e.Event, kind: type[_Said]) -> _Said | None:
    if not isinstance(event, e.ExtensionObserved | e.ExtensionNoted) or event.extension != Recorder.name:
        return None
    told = Recorder.payload_of(event)
    return told if isinstance(told, kind) else None


def _speculates(observations: Iterable[Recorded]) -> bool:
    """Whether drafts are seen: more than one token scheduled beyond the known ones."""
    return any(
        scheduled > 1 and computed + scheduled > known
        for _, event in observations
        if isinstance(event, e.StepScheduled)
        for _, computed, scheduled, known in event.advanced
    )


def _zeroes(observations: Iterable[Recorded]) -> bool:
    """Whether new blocks are zeroed; every end says so."""
    return any(
        event.blocks_zeroed for _, event in observations if isinstance(event, e.RequestPreempted | e.RequestFinished)
    )
