"""Turns the events of stored logs into the records of the API.

Lives and reasons are computed by the same code as in the commands. The record of a copy combines all events with the
copy's job id. Entries, lookups, steps and evictions are made from one event each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvledger.adapters.tools.api.errors import public_errors
from kvledger.adapters.tools.api.records import Advance, Copy, Entry, Eviction, Life, Lookup, Reason, Step
from kvledger.adapters.tools.logs import log as stored
from kvledger.adapters.tools.logs.explanation import Cause, causes_of, groups_of, reason_text
from kvledger.adapters.tools.logs.histories import read_histories
from kvledger.adapters.tools.logs.index import index_for
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.logs.reading import HEADER_LOST, begin_model, take_batch
from kvledger.adapters.tools.logs.report_shares import shares_of
from kvledger.adapters.tools.logs.requests import Requests, RequestSummary
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.reasons import RequestHistory, Span
from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.reader import Reader

_ISSUED: Mapping[type[e.Event], str] = {e.LoadIssued: "load", e.SaveIssued: "save", e.TailSaveIssued: "tail save"}
"""Decision → kind of the copy."""
_SETTLED = (e.LoadCompleted, e.LoadFailed, e.SaveCompleted, e.SaveFailed)
_COMPUTED = {"admission", "recomputed", "computed_twice"}
"""Kinds of causes about computed tokens."""


@attrs.frozen
class Source:
    """One log on disk. Each reading opens the log again, so that readings are independent of each other."""

    path: Path
    start: str
    rank: int | None
    """Rank of the worker that wrote the log; None: the scheduler did."""
    lenient: bool

    def opened(self) -> StoredLog:
        """Open the log for one reading."""
        with public_errors(self.path):
            return stored.open_log(self.path, lenient=self.lenient)

    def entries(self) -> Iterator[Entry]:
        """Yield each event that can be read."""
        log = self.opened()
        with public_errors(self.path):
            for batch in log.batches():
                for sequence, event, time_ns in batch.timed():
                    yield Entry(start=self.start, rank=self.rank, sequence=sequence, time_ns=time_ns, event=event)


class Silence:
    """A `Progress` that shows nothing, because a library does not print."""

    def progress(self, _log: StoredLog, _what: str, /) -> contextlib.AbstractContextManager[None]:
        """Show nothing."""
        return contextlib.nullcontext()

    def waiting(self, _what: str, /) -> contextlib.AbstractContextManager[None]:
        """Show nothing."""
        return contextlib.nullcontext()

    def remark(self, _text: str, /) -> None:
        """Print nothing."""


# --- one event each -----------------------------------------------------------------------------


def lookups(entries: Iterable[Entry]) -> Iterator[Lookup]:
    """Yield each answer to a lookup."""
    for entry in entries:
        event = entry.event
        if not isinstance(event, e.LookupAnswered | e.LookupDeferred):
            continue
        answer = event if isinstance(event, e.LookupAnswered) else None
        deferral = event if isinstance(event, e.LookupDeferred) else None
        yield Lookup(
            start=entry.start,
            sequence=entry.sequence,
            time_ns=entry.time_ns,
            request_id=event.request_id,
            ordinal=event.ordinal,
            generation=event.generation,
            num_computed_tokens=event.num_computed_tokens,
            num_tokens=event.num_tokens,
            num_hit_tokens=None if answer is None else answer.num_hit_tokens,
            num_external_tokens=None if answer is None else answer.num_external_tokens,
            is_async=None if answer is None else answer.is_async,
            miss_reason="" if answer is None else answer.miss_reason,
            deferred_for_job=None if deferral is None else deferral.job_id,
            num_deferred=None if deferral is None else deferral.num_deferred,
            cause=event.cause,
        )


def steps(entries: Iterable[Entry]) -> Iterator[Step]:
    """Yield each engine step."""
    for entry in entries:
        event = entry.event
        if isinstance(event, e.StepScheduled):
            yield Step(
                start=entry.start,
                sequence=entry.sequence,
                time_ns=entry.time_ns,
                step=event.step,
                num_scheduled_tokens=event.num_scheduled_tokens,
                advanced=tuple(Advance(*row) for row in event.advanced),
                paused=event.paused,
            )


def evictions(entries: Iterable[Entry]) -> Iterator[Eviction]:
    """Yield each eviction of chunks from the host pool."""
    for entry in entries:
        event = entry.event
        if isinstance(event, e.ChunksEvicted):
            yield Eviction(
                start=entry.start,
                sequence=entry.sequence,
                time_ns=entry.time_ns,
                keys=event.keys,
                request_id=event.request_id,
                ordinal=event.ordinal,
                generation=event.generation,
                cause=event.cause,
            )


# --- copies -------------------------------------------------------------------------------------


def copies(entries: Iterable[Entry]) -> Iterator[Copy]:
    """Yield each copy when it is settled, then the copies that the log does not settle."""
    in_flight: dict[int, Copy] = {}
    for entry in entries:
        event = entry.event
        if isinstance(event, e.LoadIssued | e.SaveIssued | e.TailSaveIssued):
            if event.job_id in in_flight:  # only in a damaged log: each job has its own id
                yield in_flight.pop(event.job_id)
            in_flight[event.job_id] = _issued(entry, event)
        elif isinstance(event, e.TransferReported):
            for job_id, num_bytes, duration_ns in shares_of(event):
                if job_id in in_flight:
                    in_flight[job_id] = _reported(in_flight[job_id], event, num_bytes, duration_ns)
        elif isinstance(event, _SETTLED) and event.job_id in in_flight:
            yield _settled(in_flight.pop(event.job_id), entry, event)
    yield from in_flight.values()


def _issued(entry: Entry, event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued) -> Copy:
    return Copy(
        start=entry.start,
        sequence=entry.sequence,
        time_ns=entry.time_ns,
        settled_sequence=None,
        settled_ns=None,
        kind=_ISSUED[type(event)],
        job_id=event.job_id,
        request_id=event.request_id,
        ordinal=event.ordinal,
        generation=event.generation,
        outcome="open",
        error="",
        first_token=getattr(event, "first_token", None),
        num_tokens=getattr(event, "num_tokens", None),
        chunks=getattr(event, "chunks", ()),
        block_ids=event.block_ids,
        slots=event.slots,
        num_pages=len(event.slots) - event.slots.count(NO_SLOT),
        is_async=getattr(event, "is_async", False),
        before_forward=getattr(event, "before_forward", isinstance(event, e.TailSaveIssued)),
        ranks_done=(),
        ranks_failed=(),
        num_bytes=0,
        worker_ns=0,
    )


def _reported(copy: Copy, event: e.TransferReported, num_bytes: int, duration_ns: int) -> Copy:
    return attrs.evolve(
        copy,
        ranks_done=tuple(dict.fromkeys((*copy.ranks_done, *event.ranks_done))),
        ranks_failed=tuple(dict.fromkeys((*copy.ranks_failed, *event.ranks_failed))),
        num_bytes=copy.num_bytes + num_bytes,
        worker_ns=copy.worker_ns + duration_ns,
        error=copy.error or event.error,
    )


def _settled(copy: Copy, entry: Entry, event: e.Event) -> Copy:
    outcome, error = "completed", copy.error
    if isinstance(event, e.LoadFailed | e.SaveFailed):
        is_given_up = isinstance(event, e.SaveFailed) and not event.quiet
        outcome, error = "given up" if is_given_up else "failed", event.error or copy.error
    return attrs.evolve(copy, settled_sequence=entry.sequence, settled_ns=entry.time_ns, outcome=outcome, error=error)


# --- requests -----------------------------------------------------------------------------------


def lives(source: Source) -> dict[str, tuple[Life, ...]]:
    """Return request id → lives, in the order of arrival."""
    log = source.opened()
    with public_errors(source.path):
        found: dict[str, list[Life]] = {}
        for summary in sorted(_summaries(log), key=lambda summary: summary.first_sequence):
            fields: dict[str, Any] = summary.fields()
            del fields["request_id"]
            life = Life(**fields)
            found.setdefault(summary.request_id, []).append(life)
        return {request_id: tuple(its) for request_id, its in found.items()}


def _summaries(log: StoredLog) -> list[RequestSummary]:
    index = index_for(log, Silence())
    if index is not None:
        with contextlib.closing(index):
            return list(index.summaries())
    found: list[RequestSummary] = []
    model = begin_model(log, None if log.header else HEADER_LOST)
    reader = Reader(model, [Requests(model, found.append)])
    for batch in log.batches():
        take_batch(reader, log, batch)
    reader.finish()
    return found


def reasons(source: Source, request_id: str) -> Iterator[Reason]:
    """Yield each reason of each life of a request."""
    log = source.opened()
    with public_errors(source.path):
        histories = read_histories(log, Selection(request_id=request_id), request_id, Silence())
        for history in histories.of_lives:
            for cause in _about_computed_tokens(causes_of(history, histories, log)):
                for group in groups_of(cause.spans):
                    yield _reason(
                        source,
                        history,
                        cause,
                        group,
                        reason_text(group, histories, log.configuration.chunk_size, cause.time_ns),
                    )


def _about_computed_tokens(causes: list[Cause]) -> list[Cause]:
    """Return the causes that are about computed tokens. If there are none, return the last lookup."""
    computed = [cause for cause in causes if cause.what in _COMPUTED]
    return computed or [cause for cause in causes if cause.what == "lookup"][-1:]


def _reason(source: Source, history: RequestHistory, cause: Cause, group: Sequence[Span], text: str) -> Reason:
    return Reason(
        start=source.start,
        request_id=history.request_id,
        ordinal=history.ordinal,
        of=cause.what,
        sequence=cause.sequence,
        time_ns=cause.time_ns,
        first_token=group[0].first_token,
        end_token=group[-1].end_token,
        code=group[0].reason,
        evidence=tuple(dict.fromkeys(number for span in group for number in span.evidence if number)),
        text=text,
    )
