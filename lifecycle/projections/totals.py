"""Sums over the whole log: the figures for metrics and reports.

Recomputed means computed before a preemption and again after it; recovered means loaded from the host pool
on the way back; retained means still found in vLLM's own prefix cache.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Annotated, Final, TypeVar

import attrs
import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections.base import Projection, Subject
from kvledger.lifecycle.projections.copies import CopyKind
from kvledger.lifecycle.projections.jobs import Jobs
from kvledger.lifecycle.projections.tracker import RequestTracker
from kvledger.lifecycle.ranges import MAX_INT64, Count, Int64, JobId, LifeOrdinal, NumTokens, SumOfTokens, TimeNs


@attrs.define
class Figures:
    """Counters since the log was opened, in requests, tokens, chunks, pages, bytes and nanoseconds."""

    num_requests: Count = 0
    num_preemptions: Count = 0
    num_lookups: Count = 0
    """Answers, polls included: a request that waits is asked about in every step."""
    num_tokens_offered: Int64 = 0
    """By these answers, so a poll that repeats an offer counts it again."""
    num_admissions: Count = 0
    """Requests that got blocks after an answer, once each time that they are admitted."""
    num_tokens_queried: Int64 = 0
    """Of these, beyond vLLM's own prefix hit."""
    num_tokens_hit: Int64 = 0
    """Of the queried, those that are loaded instead of computed."""
    num_tokens_loaded: Int64 = 0
    num_tokens_recovered: Int64 = 0
    num_tokens_retained: Int64 = 0
    num_tokens_recomputed: Int64 = 0
    num_chunks_saved: Count = 0
    num_chunks_evicted: Count = 0
    num_chunks_declined: Int64 = 0
    num_chunks_tainted: Count = 0
    num_bytes_saved: Int64 = 0
    num_bytes_loaded: Int64 = 0
    save_duration_ns: Int64 = 0
    load_duration_ns: Int64 = 0
    num_loads_failed: Count = 0
    num_saves_failed: Count = 0
    num_violations: Count = 0
    num_hook_failures: Count = 0
    num_extension_events: Count = 0
    num_extensions_stopped: Count = 0


def _sum(figure: int, more: int) -> int:
    """Add to a figure that must fit into the 64 bits of a snapshot, whatever numbers a log holds."""
    return max(-MAX_INT64, min(figure + more, MAX_INT64))


_MS: Final = 1_000_000
DURATION_BOUNDS_NS: Final = tuple(
    int(bound * _MS)
    for bound in (0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000)
)
"""Up to and with which a duration belongs to a bucket; what is longer to one more."""

_T = TypeVar("_T")
_ByBucket = Annotated[
    list[_T], msgspec.Meta(min_length=len(DURATION_BOUNDS_NS) + 1, max_length=len(DURATION_BOUNDS_NS) + 1)
]


class Durations(msgspec.Struct, forbid_unknown_fields=True):
    """How long something took each time: for each bucket how often, and the sum, with which its mean is exact."""

    counts: _ByBucket[Count] = []
    sums_ns: _ByBucket[Int64] = []

    def __post_init__(self) -> None:
        """Not by a factory of the fields: a function's representation is another one in each process (`_layout`)."""
        num_buckets = len(DURATION_BOUNDS_NS) + 1
        self.counts = self.counts or [0] * num_buckets
        self.sums_ns = self.sums_ns or [0] * num_buckets

    def add(self, duration_ns: int) -> None:
        """Count one."""
        bucket = bisect_left(DURATION_BOUNDS_NS, duration_ns)
        self.counts[bucket] += 1
        self.sums_ns[bucket] = _sum(self.sums_ns[bucket], duration_ns)


_COUNTED: Mapping[type[e.Event], str] = {
    e.SaveFailed: "num_saves_failed",
    e.ChunkEvicted: "num_chunks_evicted",
    e.ChunkTainted: "num_chunks_tainted",
    e.InvariantViolated: "num_violations",
    e.HookFailed: "num_hook_failures",
    e.ExtensionStopped: "num_extensions_stopped",
}
"""Events of which there is nothing but a count -> the figure."""


class State(msgspec.Struct, forbid_unknown_fields=True):
    """The sums, and what will be added to them."""

    figures: Figures = msgspec.field(default_factory=Figures)
    loading: dict[JobId, NumTokens] = {}
    """Load under way -> its tokens."""
    returning: dict[LifeOrdinal, tuple[NumTokens, SumOfTokens]] = {}
    """Life of a preempted request that was looked up again -> tokens retained and recovered, until a step runs."""
    preempted_ns: dict[LifeOrdinal, TimeNs] = {}
    """Life that was preempted -> when, the first time since it last ran."""
    load_times: Durations = msgspec.field(default_factory=Durations)
    """Of copies, as the workers measured them; the slowest rank's."""
    save_times: Durations = msgspec.field(default_factory=Durations)
    recovery_times: Durations = msgspec.field(default_factory=Durations)
    """From a preemption until a step schedules the request again."""
    num_events_of: dict[str, Count] = {}
    """Extension -> how many of `figures.num_extension_events` are its own."""


class Totals(Projection):
    """Folds every event that counts into `figures`. Registered before the others, to see states as they were."""

    def __init__(self, tracker: RequestTracker, jobs: Jobs) -> None:
        self._tracker = tracker
        self._jobs = jobs
        self.state = State()

    @property
    def figures(self) -> Figures:
        """The sums so far."""
        return self.state.figures

    @on(*_COUNTED)
    def _count(self, event: e.Event, _sequence: int, _subject: Subject) -> None:
        name = _COUNTED[type(event)]
        setattr(self.figures, name, getattr(self.figures, name) + 1)

    @on(e.ExtensionObserved, e.ExtensionDecided, e.ExtensionNoted)
    def _of_extension(self, event: e.ExtensionEvent, _sequence: int, _subject: Subject) -> None:
        self.figures.num_extension_events += 1
        self.state.num_events_of[event.extension] = self.state.num_events_of.get(event.extension, 0) + 1

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived, sequence: int, subject: Subject) -> None:
        self.figures.num_requests += 1
        self._finished(event, sequence, subject)

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted, _sequence: int, _subject: Subject) -> None:
        self.figures.num_preemptions += 1
        record = self._tracker.get(event.request_id)
        if record is not None:
            self.state.returning.pop(record.ordinal, None)
            self.state.preempted_ns.setdefault(record.ordinal, event.time_ns)

    @on(e.LookupRequested)
    def _lookup_requested(self, event: e.LookupRequested, _sequence: int, _subject: Subject) -> None:
        record = self._tracker.get(event.request_id)
        if record is not None and record.num_preemptions:
            num_retained = min(event.num_computed_tokens, record.num_tokens_before_preemption)
            self.state.returning[record.ordinal] = (num_retained, 0)

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered, _sequence: int, _subject: Subject) -> None:
        self.figures.num_lookups += 1
        self.figures.num_tokens_offered = _sum(self.figures.num_tokens_offered, event.num_external_tokens)

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated, _sequence: int, subject: Subject) -> None:
        answer = None if subject.request is None else subject.request.answer
        if answer is not None:  # without one it is the second phase of an asynchronous load, or a session's next turn
            self.figures.num_admissions += 1
            self.figures.num_tokens_queried += max(0, answer.num_tokens - answer.num_computed_tokens)
            self.figures.num_tokens_hit += max(0, min(event.num_external_tokens, answer.num_external_tokens))

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued, _sequence: int, subject: Subject) -> None:
        self.state.loading[event.job_id] = event.num_tokens
        record = subject.current
        if record is not None and event.ordinal in self.state.returning:
            num_retained, _ = self.state.returning[event.ordinal]
            last = min(event.first_token + event.num_tokens, record.num_tokens_before_preemption)
            self.state.returning[event.ordinal] = (num_retained, max(0, last - event.first_token))

    @on(e.RequestFinished)
    def _finished(self, event: e.RequestEvent, _sequence: int, _subject: Subject) -> None:
        record = self._tracker.get(event.request_id)
        if record is not None:
            self.state.returning.pop(record.ordinal, None)
            self.state.preempted_ns.pop(record.ordinal, None)

    @on(e.LoadCompleted)
    def _load_completed(self, event: e.LoadCompleted, _sequence: int, _subject: Subject) -> None:
        self.figures.num_tokens_loaded += self.state.loading.pop(event.job_id, 0)

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled, _sequence: int, _subject: Subject) -> None:
        for ordinal, num_computed_tokens, num_scheduled_tokens, _ in event.advanced:
            record = self._tracker.of(ordinal)
            if record is not None and record.num_preemptions:
                preempted_ns = self.state.preempted_ns.pop(ordinal, None)
                if preempted_ns is not None:
                    self.state.recovery_times.add(max(0, event.time_ns - preempted_ns))
                num_retained, num_recovered = self.state.returning.pop(ordinal, (0, 0))
                self.figures.num_tokens_retained += num_retained
                self.figures.num_tokens_recovered += num_recovered
                last = min(num_computed_tokens + num_scheduled_tokens, record.num_tokens_before_preemption)
                self.figures.num_tokens_recomputed += max(0, last - num_computed_tokens)

    @on(e.TransferReported)
    def _reported(self, event: e.TransferReported, _sequence: int, _subject: Subject) -> None:
        job = next(filter(None, map(self._jobs.get, event.job_ids)), None)
        if job is None:
            return
        figures, is_load = self.figures, job.kind is CopyKind.LOAD
        if is_load:
            figures.num_bytes_loaded = _sum(figures.num_bytes_loaded, sum(event.num_bytes))
            figures.load_duration_ns = _sum(figures.load_duration_ns, event.duration_ns)
        else:
            figures.num_bytes_saved = _sum(figures.num_bytes_saved, sum(event.num_bytes))
            figures.save_duration_ns = _sum(figures.save_duration_ns, event.duration_ns)
        if event.duration_ns:  # a copy that failed, or was not handed out, was not measured
            (self.state.load_times if is_load else self.state.save_times).add(event.duration_ns)

    @on(e.SaveCompleted)
    def _save_completed(self, event: e.SaveCompleted, _sequence: int, _subject: Subject) -> None:
        job = self._jobs.get(event.job_id)
        if job is not None:
            self.figures.num_chunks_saved += len(job.keys)

    @on(e.SaveDeclined)
    def _save_declined(self, event: e.SaveDeclined, _sequence: int, _subject: Subject) -> None:
        self.figures.num_chunks_declined += event.num_chunks

    @on(e.LoadFailed)
    def _load_failed(self, event: e.LoadFailed, _sequence: int, _subject: Subject) -> None:
        self.state.loading.pop(event.job_id, None)
        self.figures.num_loads_failed += 1
