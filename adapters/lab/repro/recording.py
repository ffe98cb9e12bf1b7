"""Reads from a log what a rerun needs: observations, and facts about the decisions to which observations refer.

The decisions themselves are left out, because the code under test makes its own decisions. This module depends on
events only, including the recorder's events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain, repeat
from pathlib import Path
from typing import NamedTuple, TypeVar

import attrs
import msgspec

from kvledger.adapters.recorded.extension import Recorder
from kvledger.adapters.recorded.payloads import (
    CHILD,
    RecordingStarted,
    ReportedBy,
    Transferred,
    TransferredFor,
    TransfersEnded,
    WorkersReported,
)
from kvledger.adapters.tools.logs.log import open_log
from kvledger.lifecycle import LedgerConfiguration, SequencedEvent
from kvledger.lifecycle import events as e

_Event = TypeVar("_Event", bound=e.Event)
_Payload = TypeVar("_Payload")
JOB_ISSUED = (e.LoadIssued, e.SaveIssued, e.TailSaveIssued)


class NotRerunnable(ValueError):
    """A log, or a part of a log, cannot be run again. The message has the reason."""


class Job(NamedTuple):
    """Why a copy was issued, and for which request."""

    cause: int
    """Sequence number of the observation because of which the copy was issued."""
    request_id: str
    ordinal: int


@attrs.frozen
class Recording:
    """A log's observations up to an incident."""

    configuration: LedgerConfiguration
    observations: tuple[SequencedEvent, ...]
    jobs: Mapping[int, Job] = attrs.field(factory=dict)
    """Job id → why the job was issued. A rerun gives jobs other ids if it decides otherwise or leaves requests out."""
    answers: Mapping[int, int | None] = attrs.field(factory=dict)
    """Sequence number of a lookup → tokens in the answer; None: a deferral. Lookups that got 0 tokens are left out."""
    wrapped: RecordingStarted | None = None
    """Facts about the recorded connector and its engine; None if kvledger's own connector wrote the log."""
    copies: Mapping[str, tuple[str, bool, int]] = attrs.field(factory=dict)
    """Copies that the workers of a wrapped connector completed: name → (request id, whether the copy is a load, number
    of the request's earlier copies in the same direction). In a rerun, a copy may have another name."""

    @property
    def speculates(self) -> bool:
        """Whether the engine decoded speculatively.

        The sign is a step that scheduled several tokens of one request, some of which were not known yet.
        """
        return any(
            scheduled > 1 and computed + scheduled > known
            for _, event in self.observations
            if isinstance(event, e.StepScheduled)
            for _, computed, scheduled, known in event.advanced
        )

    @property
    def zeroes_new_blocks(self) -> bool:
        """Whether the workers zeroed new blocks before the forward pass.

        The events of preemptions and of finished requests record this.
        """
        return any(
            event.blocks_zeroed
            for _, event in self.observations
            if isinstance(event, e.RequestPreempted | e.RequestFinished)
        )


def read_recording(path: Path) -> Recording:
    """Return the recording of a log.

    Raises:
        NotRerunnable: the log is damaged.
        CommandFailed: the log cannot be read.
    """
    log = open_log(path)
    recording = record(log.configuration, log.trusted_events())
    if log.damage:
        raise NotRerunnable(f"{path} is damaged: {log.damage[0].detail}; write it again with `kvledger repro`")
    return recording


_MAX_TOKENS = 1 << 23
"""Most tokens of all requests of a recording together. Each is created, in 36 bytes."""


def _check_tokens(events: Iterable[SequencedEvent]) -> None:
    """Refuse a recording whose requests have too many tokens for a rerun. A log may contain any number of tokens."""
    num_tokens: dict[object, int] = {}
    num_all_tokens = 0
    ordinals: dict[str, int] = {}
    for sequence, event in events:
        rows: list[tuple[object, int]] = []
        if isinstance(event, e.RequestArrived):
            ordinals[event.request_id] = event.ordinal
            rows = [(event.ordinal, event.num_prompt_tokens)]
        elif isinstance(event, e.StepScheduled):
            rows = [(ordinal, max(start + count, known)) for ordinal, start, count, known in event.advanced]
        elif isinstance(event, e.LookupRequested | e.RequestPreempted | e.SessionContinued | e.RequestFinished):
            rows = [(ordinals.get(event.request_id, event.request_id), event.num_tokens)]
        for owner, count in rows:
            num_more = count - num_tokens.get(owner, 0)
            if num_more > 0:
                num_tokens[owner] = count
                num_all_tokens += num_more
        if num_all_tokens > _MAX_TOKENS:
            raise NotRerunnable(
                f"the requests have more than {_MAX_TOKENS:,} tokens by event {sequence}, and a rerun creates every "
                "token; give a log with fewer or shorter requests, or choose an earlier incident with --until"
            )


_DONE_AGAIN = (e.EffectsDelivered, e.ExtensionObserved, e.HookFailed, e.LogNote, e.TransferReported, e.ExtensionNoted)
"""Events in which a recorder records the wrapped connector. A rerun makes them, unless they quote the workers."""


def record(configuration: LedgerConfiguration, events: Iterable[SequencedEvent]) -> Recording:
    """Return the recording of a log's events. The events must include the decisions, be in order, and have no gap.

    Raises:
        NotRerunnable: a recorder's log does not show what the workers did, or the requests have too many tokens.
    """
    events = list(events)
    _check_tokens(events)
    wrapped = next((found for _, event in events if (found := _payload(event, RecordingStarted)) is not None), None)
    observations: list[SequencedEvent] = []
    ordinals: dict[str, int] = {}
    asked: dict[str, int] = {}
    jobs: dict[int, Job] = {}
    answers: dict[int, int | None] = {}
    copies: dict[str, tuple[str, bool, int]] = {}
    counts: Counter[tuple[str, bool]] = Counter()
    for sequence, event in events:
        if isinstance(event, e.RequestArrived):
            ordinals[event.request_id] = event.ordinal
        elif isinstance(event, e.LookupRequested):
            asked[event.request_id] = sequence
        elif isinstance(event, e.LookupAnswered | e.LookupDeferred):
            answer = event.num_external_tokens if isinstance(event, e.LookupAnswered) else None
            if answer != 0 and event.request_id in asked:
                answers[asked[event.request_id]] = answer
        elif isinstance(event, JOB_ISSUED):
            jobs[event.job_id] = Job(event.cause, event.request_id, ordinals.get(event.request_id, -1))
        copy = transferred(event)
        if copy is not None and copy[1].job not in copies:
            request_id, is_load = copy[0], copy[1].is_load
            copies[copy[1].job] = (request_id, is_load, counts[request_id, is_load])
            counts[request_id, is_load] += 1
        if event.is_decision or isinstance(event, e.PagesDigested):  # a rerun has no pages to hash
            continue
        if wrapped is None or not isinstance(event, _DONE_AGAIN) or _is_of_workers(sequence, event):
            observations.append((sequence, event))
    completed = {job for _, event in observations for job in ended_transfers(event)}
    copies = {job: copy for job, copy in copies.items() if job in completed}
    return Recording(configuration, tuple(observations), jobs, answers, wrapped, copies)


def _is_of_workers(sequence: int, event: e.Event) -> bool:
    """Whether a recorder's event repeats a report of the workers. A rerun needs such events, because it has no workers.

    Raises:
        NotRerunnable: the workers' reports cannot be repeated from this log.
    """
    if isinstance(event, e.LogNote) and event.text.startswith(CHILD):
        raise NotRerunnable(
            "the recorder was inside MultiConnector, so its log includes the reports of the other children; wrap "
            "MultiConnector, or the connector alone, in the recorder"
        )
    reported = reported_by_workers(event)
    if reported is not None and reported.unread:
        raise NotRerunnable(
            f"the workers' report in event {sequence} has no decoder: {reported.unread}; add a decoder to "
            "kvledger.adapters.recorder.decoders, and an encoder to kvledger.adapters.lab.repro.vllm_objects"
        )
    return reported is not None or ends_of_connector(event) is not None or bool(ended_transfers(event))


def changed(event: _Event, **fields: object) -> _Event:
    """Return a copy of the event with the given values in these fields."""
    return msgspec.structs.replace(event, **fields)


def of_jobs(report: e.TransferReported, names: Mapping[int, int]) -> e.TransferReported | None:
    """Return the part of a report that is about the jobs in `names`, with their ids in the rerun.

    Args:
        report: a report of the recording.
        names: id of a job in the recording → its id in the rerun.

    Returns:
        The part of the report; None if the report is about none of these jobs.
    """
    sizes = chain(report.num_bytes, repeat(0))  # a damaged report may have too few or too many
    pairs = zip(report.job_ids, sizes, strict=False)
    kept = [(names[job_id], num_bytes) for job_id, num_bytes in pairs if job_id in names]
    if not kept:
        return None
    job_ids, num_bytes = zip(*kept, strict=True)
    return changed(report, job_ids=job_ids, num_bytes=num_bytes)


def ended_transfers(event: e.Event) -> tuple[str, ...]:
    """Return the names of the copies that a recorder's event reports as completed."""
    ended = _payload(event, TransfersEnded)
    return () if ended is None else ended.jobs


def reported_by_workers(event: e.Event) -> WorkersReported | None:
    """Return the workers' report in a recorder's event; None for any other event."""
    return _payload(event, WorkersReported)


def ends_of_connector(event: e.Event) -> ReportedBy | None:
    """Return a report of one connector's worker about copies that ended. None if the event is not such a report."""
    return _payload(event, ReportedBy)


def transferred(event: e.Event) -> tuple[str, Transferred] | None:
    """Return (request id, copy) if the event is about a copy of a wrapped connector; otherwise None."""
    copy = _payload(event, Transferred)
    if copy is not None and isinstance(event, e.ExtensionObserved):
        return event.request_id, copy
    of_ended = _payload(event, TransferredFor)
    return None if of_ended is None else (of_ended.request_id, of_ended.copy)


def _payload(event: e.Event, kind: type[_Payload]) -> _Payload | None:
    if not isinstance(event, e.ExtensionObserved | e.ExtensionNoted) or event.extension != Recorder.name:
        return None
    payload = Recorder.payload_of(event)
    return payload if type(payload) is kind else None
