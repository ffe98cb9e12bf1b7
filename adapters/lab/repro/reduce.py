"""Reduces a recording: leaves out the requests, and then the hook calls, that an incident does not need.

This is delta debugging. Each trial leaves something out and runs the rest again. The rest must fail with the same
message. vLLM's scheduler must be able to make its calls, if it could make all calls of the recording. The rest must
break no rule and change no answer that a rerun of the whole recording keeps.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

import attrs

from kvledger.adapters.lab.repro.calls import HookCall, hook_calls
from kvledger.adapters.lab.repro.outcome import HOOK_FAILED, Rerun
from kvledger.adapters.lab.repro.recording import NotRerunnable, Recording, changed, ended_transfers, of_jobs, record
from kvledger.adapters.lab.repro.scheduler import SchedulerModel, could_be_scheduled
from kvledger.lifecycle import SequencedEvent
from kvledger.lifecycle import events as e

MAX_TRIED_OBSERVATIONS = 400_000
"""Most observations of all trials together: some ten seconds on the core, two minutes through hooks."""
_NUMBER = re.compile(r"\d+")
_Item = TypeVar("_Item")


@attrs.frozen
class Reduced:
    """A reduced recording, and what the trials have shown about it."""

    events: Sequence[SequencedEvent] | None
    """Events that a rerun of the reduced recording wrote. A rerun of these events fails, too.

    None if the recording was not reduced.
    """
    recurs: bool | None
    """Whether the incident occurs again with the installed code. None if this was not tried.

    Without an incident, whether the lookups get the recorded answers again.
    """
    num_left_out: int = 0
    """Number of requests that were left out."""
    other_answers: Sequence[str] = ()
    """Answers that differ from the recorded ones, as text."""


def reduce(
    recording: Recording, run: Callable[[Recording], Rerun], *, rule: str, request_id: str, leaves_out_calls: bool
) -> Reduced:
    """Reduce a recording that ends with an incident.

    Args:
        recording: the recording up to the incident.
        run: function that runs a recording again.
        rule: the broken rule; empty if there is no incident and only the answers must stay equal.
        request_id: the request that must not be left out; empty if any request may be left out.
        leaves_out_calls: whether to leave out single hook calls, too.
    """
    whole = run(recording)
    wanted = _wrong(whole, rule, request_id)
    recurs = bool(wanted) if rule else not whole.other_answers
    requests = {arrived.ordinal: arrived.request_id for arrived in _arrivals(recording)}
    own = [ordinal for ordinal, name in requests.items() if name == request_id]
    if not recurs or (request_id and not own):
        return Reduced(None, recurs, other_answers=whole.other_answers)
    allowed = {trouble.rule for trouble in whole.troubles}
    chunk_size = recording.configuration.chunk_size
    is_possible = could_be_scheduled(recording.observations, chunk_size)
    budget = MAX_TRIED_OBSERVATIONS

    def holds(candidate: Recording) -> bool:
        nonlocal budget
        if budget < len(candidate.observations):
            return False
        if is_possible and not could_be_scheduled(candidate.observations, chunk_size):
            return False
        budget -= len(candidate.observations)
        try:
            found = run(candidate)
        except NotRerunnable:
            return False
        return (
            {trouble.rule for trouble in found.troubles} <= allowed
            and _wrong(found, rule, request_id) >= wanted
            and set(found.other_answers) <= set(whole.other_answers)
            and set(found.left_out) <= set(whole.left_out)
        )

    others = [ordinal for ordinal in requests if ordinal not in own]
    kept = minimal(others, lambda some: holds(restrict(recording, {*own, *some})))
    best = restrict(recording, {*own, *kept})
    if rule and leaves_out_calls:
        calls, _ = hook_calls(best.observations)
        best = _of_calls(best, minimal(calls, lambda some: holds(_of_calls(best, some))))
    events = run(best).events
    again = run(record(recording.configuration, events))  # as a reader of the file will run it
    if not {name for name, _ in _wrong(again, rule, request_id)} >= {name for name, _ in wanted}:
        return Reduced(None, recurs)
    return Reduced(events, recurs, len(others) - len(kept))


def minimal(items: Sequence[_Item], holds: Callable[[Sequence[_Item]], bool]) -> Sequence[_Item]:
    """Leave out items as long as `holds` is true of the remaining items. Return the remaining items in order.

    `holds` must be true of the whole list. This is Zeller's ddmin, but it never tries a part alone: it only leaves out
    parts, which get smaller and smaller.
    """
    kept, size = list(items), len(items)
    while size:
        start = 0
        while start < len(kept):
            fewer = kept[:start] + kept[start + size :]
            if holds(fewer):
                kept = fewer
            else:
                start += size
        size //= 2
    return kept


def _wrong(outcome: Rerun, rule: str, request_id: str) -> set[tuple[str, str]]:
    """Return (rule, detail) of each breach of the rule that can concern the request. An empty id means any request.

    Numbers are removed from the detail, except for failed hooks. The numbers of copies and blocks may change when
    something is left out.
    """
    return {
        (trouble.rule, _NUMBER.sub("", trouble.detail) if rule != HOOK_FAILED else trouble.detail)
        for trouble in outcome.troubles
        if trouble.rule == rule and (not request_id or trouble.request_id in {"", request_id})
    }


def _arrivals(recording: Recording) -> Iterable[e.RequestArrived]:
    return (event for _, event in recording.observations if isinstance(event, e.RequestArrived))


def restrict(recording: Recording, kept: Collection[int]) -> Recording:
    """Return the recording with some requests only. `kept` has the ordinals of these requests.

    All steps after the first arrival stay, even steps without these requests. The reason is that kvledger counts the
    steps in which it hears nothing of a copy.
    """
    observations: list[SequencedEvent] = []
    ordinals: dict[str, int] = {}
    record = SchedulerModel(is_async=False)
    jobs = {job_id: job for job_id, job in recording.jobs.items() if job.ordinal in {-1, *kept}}
    for sequence, event in recording.observations:
        if isinstance(event, e.RequestArrived):
            ordinals[event.request_id] = event.ordinal
        request_id = getattr(event, "request_id", "")
        if request_id and ordinals.get(request_id) not in kept:
            continue
        if isinstance(event, e.TransferReported):
            kept_jobs = (job_id for job_id in event.job_ids if job_id in jobs or job_id not in recording.jobs)
            left = of_jobs(event, {job_id: job_id for job_id in kept_jobs})
            if left is None:
                continue
            event = left  # noqa: PLW2901 -- what is left of it
        if isinstance(event, e.StepScheduled):
            event = _restricted_step(event, kept, record)  # noqa: PLW2901 -- what is left of it
        else:
            record.fold(event, recording.configuration.chunk_size)
        observations.append((sequence, event))
    return attrs.evolve(recording, observations=tuple(_from_first_arrival(observations)), jobs=jobs)


def _from_first_arrival(observations: list[SequencedEvent]) -> Iterable[SequencedEvent]:
    """Drop the observations before the first arrival, and number the steps from 0, as an engine does."""
    left = itertools.dropwhile(lambda entry: not isinstance(entry[1], e.RequestArrived), observations)
    first_step: int | None = None
    for sequence, event in left:
        if isinstance(event, e.StepScheduled):
            first_step = event.step if first_step is None else first_step
            yield sequence, changed(event, step=event.step - first_step)
        else:
            yield sequence, event


def _restricted_step(event: e.StepScheduled, kept: Collection[int], record: SchedulerModel) -> e.StepScheduled:
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


def _of_calls(recording: Recording, calls: Sequence[HookCall]) -> Recording:
    observations = tuple(entry for call in calls for entry in call.observed)
    ended = {job for _, event in observations for job in ended_transfers(event)}
    copies = {job: of for job, of in recording.copies.items() if job in ended}
    return attrs.evolve(recording, observations=observations, copies=copies)
