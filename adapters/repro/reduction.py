"""Leaves out of a recording what the incident does not need.

First the requests that have nothing in common with the one in question: no chunk, block, slot or eviction, not even
over others. Then, by trial, whoever else can be spared. What is left must break the same rule and decide the same for
the request; where that cannot be shown with the code at hand, nothing is left out.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import attrs

from kvledger.adapters.repro.core import reenact_core
from kvledger.adapters.repro.recording import JOB_ISSUED, Recorded, Recording, changed
from kvledger.adapters.repro.reenactment import Reenactment
from kvledger.adapters.repro.scheduler_record import SchedulerRecord
from kvledger.lifecycle import SequencedEvent
from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import field_names

MAX_TRIED_OBSERVATIONS = 400_000
"""How many observations all trials together may take: some ten seconds."""
_NOT_COMPARED = frozenset({"cause", "job_id", "slots", "miss_cause", "time_ns"})
"""What may differ where other requests are left out."""


@attrs.frozen
class Reduced:
    """A recording and what is known about it."""

    recording: Recording
    recurs: bool
    """Whether the core, as it is installed here, breaks the rule again."""
    num_left_out: int
    """Requests."""


def reduce(
    recording: Recording,
    events: Sequence[SequencedEvent],
    *,
    rules: Collection[str],
    request_id: str,
    keep_all: bool = False,
    handlers: Sequence[str] = (),
) -> Reduced:
    """Reduce a recording that ends with an incident.

    Args:
        recording: up to the incident.
        events: the log's events up to there, decisions included.
        rules: that were broken; where there are none, the decisions alone must stay.
        request_id: whose decisions must stay as they were; empty for nobody's.
        keep_all: leave nothing out, only tell whether it recurs.
        handlers: state handlers that the engine had, as "module:Class".
    """
    whole = reenact_core(recording, handlers=handlers)
    wanted = _Wanted(rules, request_id, whole.events if rules else events, handlers)
    if not wanted.is_told_by(whole):
        return Reduced(recording, recurs=False, num_left_out=0)
    lives = {
        event.ordinal: event.request_id for _, event in recording.observations if isinstance(event, e.RequestArrived)
    }
    own = {ordinal for ordinal, name in lives.items() if name == request_id}
    if keep_all or not own:
        return Reduced(recording, recurs=True, num_left_out=0)
    best, kept = recording, set(lives)
    related = _related(events, own)
    if related < kept:
        candidate = restrict(recording, related)
        if wanted.is_in(candidate):
            best, kept = candidate, related
    best, kept = _spare(recording, best, kept, own, wanted)
    return Reduced(best, recurs=True, num_left_out=len(lives) - len(kept))


def _spare(
    recording: Recording, best: Recording, kept: set[int], own: set[int], wanted: _Wanted
) -> tuple[Recording, set[int]]:
    """Try without others, many at once first."""
    budget = MAX_TRIED_OBSERVATIONS
    num_at_once = len(kept)
    while num_at_once >= 1:
        others = sorted(kept - own)
        for start in range(0, len(others), num_at_once):
            candidate_kept = kept - set(others[start : start + num_at_once])
            if candidate_kept == kept:
                continue
            candidate = restrict(recording, candidate_kept)
            budget -= len(candidate.observations)
            if budget < 0:
                return best, kept
            if wanted.is_in(candidate):
                best, kept = candidate, candidate_kept
        num_at_once //= 2
    return best, kept


class _Wanted:
    """The incident, and the decisions about its request."""

    def __init__(
        self, rules: Collection[str], request_id: str, events: Iterable[SequencedEvent], handlers: Sequence[str]
    ) -> None:
        self._handlers = handlers
        self._rules = rules
        self._request_id = request_id
        self._decisions = self._of_request(events)

    def is_in(self, candidate: Recording) -> bool:
        return self.is_told_by(reenact_core(candidate, handlers=self._handlers))

    def is_told_by(self, reenactment: Reenactment) -> bool:
        broken = {trouble.rule for trouble in reenactment.troubles if self._concerns(trouble.request_id)}
        return broken.issuperset(self._rules) and self._of_request(reenactment.events) == self._decisions

    def _concerns(self, request_id: str) -> bool:
        return not self._request_id or request_id in {"", self._request_id}

    def _of_request(self, events: Iterable[SequencedEvent]) -> list[tuple[object, ...]]:
        return [
            (event.id, *(getattr(event, name) for name in field_names(type(event)) if name not in _NOT_COMPARED))
            for _, event in events
            if event.is_decision and getattr(event, "request_id", None) == self._request_id
        ]


def _related(events: Iterable[SequencedEvent], own: set[int]) -> set[int]:
    """Lives that share something with these, over any number of others."""
    sharing: dict[tuple[str, object], set[int]] = defaultdict(set)
    ordinals: dict[str, int] = {}
    for _, event in events:
        if isinstance(event, e.RequestArrived):
            ordinals[event.request_id] = event.ordinal
        for thing, ordinal in _things(event, ordinals):
            sharing[thing].add(ordinal)
    things_of: dict[int, list[tuple[str, object]]] = defaultdict(list)
    for thing, lives in sharing.items():
        for ordinal in lives:
            things_of[ordinal].append(thing)
    found, new = set(own), list(own)
    while new:
        for thing in things_of[new.pop()]:
            for ordinal in sharing.pop(thing, set()) - found:
                found.add(ordinal)
                new.append(ordinal)
    return found


def _things(event: e.Event, ordinals: dict[str, int]) -> Iterable[tuple[tuple[str, object], int]]:
    if isinstance(event, e.StepScheduled):
        for ordinal, block_ids in event.extended:
            yield from ((("block", block_id), ordinal) for block_id in block_ids)
        return
    ordinal = ordinals.get(getattr(event, "request_id", ""), -1)
    if ordinal < 0:
        return
    if isinstance(event, e.ChunkKeysObserved):
        yield from ((("chunk", key), ordinal) for key in event.keys)
    elif isinstance(event, e.ChunkEvicted):
        yield ("chunk", event.key), ordinal
    elif isinstance(event, e.BlocksAllocated | e.BlockTableObserved):
        yield from ((("block", block_id), ordinal) for block_id in event.block_ids)
    elif isinstance(event, JOB_ISSUED):
        yield from ((("slot", slot), ordinal) for slot in event.slots)


def restrict(recording: Recording, kept: Collection[int]) -> Recording:
    """The recording of these lives alone.

    From their first arrival on steps stay, also where nobody is left in them: silence is counted in steps.
    """
    observations: list[Recorded] = []
    ordinals: dict[str, int] = {}
    record = SchedulerRecord(is_async=False)
    jobs = _jobs_of(recording, kept)
    for sequence, event in recording.observations:
        if isinstance(event, e.RequestArrived):
            ordinals[event.request_id] = event.ordinal
        request_id = getattr(event, "request_id", "")
        if request_id and ordinals.get(request_id) not in kept:
            continue
        if isinstance(event, e.TransferReported) and event.job_id in recording.jobs and event.job_id not in jobs:
            continue
        if isinstance(event, e.StepScheduled):
            event = _restricted_step(event, kept, record)  # noqa: PLW2901 -- what is left of it
        else:
            record.fold(event, recording.configuration.chunk_size)
        observations.append((sequence, event))
    return attrs.evolve(recording, observations=tuple(_from_first_arrival(observations)), jobs=jobs)


def _from_first_arrival(observations: list[Recorded]) -> Iterable[Recorded]:
    """Without steps before anybody was there; those that are left count from 0, as an engine's do."""
    left = itertools.dropwhile(lambda entry: not isinstance(entry[1], e.RequestArrived), observations)
    first_step: int | None = None
    for sequence, event in left:
        if isinstance(event, e.StepScheduled):
            first_step = event.step if first_step is None else first_step
            yield sequence, changed(event, step=event.step - first_step)
        else:
            yield sequence, event


def _jobs_of(recording: Recording, kept: Collection[int]) -> dict[int, tuple[int, str]]:
    """The jobs of these lives; an id that was used again means the life that it named when the job was issued."""
    arrivals: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for sequence, event in recording.observations:
        if isinstance(event, e.RequestArrived):
            arrivals[event.request_id].append((sequence, event.ordinal))
    found = {}
    for job_id, (cause, request_id) in recording.jobs.items():
        lives = [ordinal for sequence, ordinal in arrivals[request_id] if sequence <= cause]
        if not lives or lives[-1] in kept:
            found[job_id] = (cause, request_id)
    return found


def _restricted_step(event: e.StepScheduled, kept: Collection[int], record: SchedulerRecord) -> e.StepScheduled:
    restricted = changed(
        event,
        advanced=tuple(entry for entry in event.advanced if entry[0] in kept),
        paused=tuple(ordinal for ordinal in event.paused if ordinal in kept),
        extended=tuple(entry for entry in event.extended if entry[0] in kept),
        settled=tuple(entry for entry in event.settled if entry[0] in kept),
    )
    scheduled = record.scheduled(restricted)
    record.stepped(restricted, scheduled)
    return changed(restricted, num_scheduled_tokens=sum(part.num_scheduled_tokens for part in scheduled))
