"""From a log's events to a recording. It knows events only."""

from __future__ import annotations

from collections.abc import Iterable

from kvledger.adapters.repro.guesses import with_guesses
from kvledger.adapters.repro.recording import JOB_ISSUED, Recorded, Recording
from kvledger.lifecycle import LedgerConfiguration
from kvledger.lifecycle import events as e


def record(configuration: LedgerConfiguration, events: Iterable[Recorded]) -> Recording:
    """A recording of these events of a log, decisions included, in order and without a gap."""
    observations: list[Recorded] = []
    jobs: dict[int, tuple[int, str]] = {}
    answers: dict[int, int] = {}
    for sequence, event in events:
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
