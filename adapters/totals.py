"""Sums over the events of a log, for metrics and reports. No decision uses them, so they are no part of the core.

The connector counts while it serves requests, and the tools count while they read a log. Both use `Totals`.

Recomputed means computed before a preemption and again after it; recovered means loaded from the host pool
on the way back; retained means still found in vLLM's own prefix cache.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, TypeVar

import attrs
import msgspec

from kvledger.lifecycle import Projections, Subject, raise_if_unstoppable
from kvledger.lifecycle import events as e
from kvledger.lifecycle.ranges import MAX_INT64, Count, Int64, JobId, LifeOrdinal, NumTokens, SumOfTokens, TimeNs
from kvledger.lifecycle.untrusted import Undecodable, msgpack_decoder

FORMAT: Final = 2
"""Grows with every change of what is counted. Totals that a snapshot has in another format are not used."""


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
"""Upper bounds of the histogram buckets, inclusive; longer durations go into an overflow bucket."""

_T = TypeVar("_T")
_ByBucket = Annotated[
    list[_T], msgspec.Meta(min_length=len(DURATION_BOUNDS_NS) + 1, max_length=len(DURATION_BOUNDS_NS) + 1)
]


class Durations(msgspec.Struct, forbid_unknown_fields=True):
    """How long something took each time: for each bucket how often, and the sum, with which its mean is exact."""

    counts: _ByBucket[Count] = []
    sums_ns: _ByBucket[Int64] = []

    def __post_init__(self) -> None:
        """Not by a factory of the fields: an index compares the layout, and a function is shown by its address."""
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
    e.InvariantViolated: "num_violations",
    e.HookFailed: "num_hook_failures",
    e.ExtensionStopped: "num_extensions_stopped",
}
"""Events that only add one → the figure."""


class State(msgspec.Struct, forbid_unknown_fields=True):
    """The sums, and what will be added to them."""

    figures: Figures = msgspec.field(default_factory=Figures)
    loading: dict[JobId, NumTokens] = {}
    """Load in flight → its tokens."""
    returning: dict[LifeOrdinal, tuple[NumTokens, SumOfTokens]] = {}
    """Life of a preempted request that was looked up again → tokens retained and recovered, until a step runs."""
    preempted_ns: dict[LifeOrdinal, TimeNs] = {}
    """Life that was preempted → when, the first time since it last ran."""
    load_times: Durations = msgspec.field(default_factory=Durations)
    """Of copies, as the workers measured them; the slowest rank's."""
    save_times: Durations = msgspec.field(default_factory=Durations)
    recovery_times: Durations = msgspec.field(default_factory=Durations)
    """From a preemption until a step schedules the request again."""
    num_events_of: dict[str, Count] = {}
    """Extension → how many of `figures.num_extension_events` are its own."""


_decode = msgpack_decoder(tuple[int, State])


class Totals:
    """Counts each event right before `projections` fold it: it adds what the request and the copy were until then.

    A refused observation is not counted, and nothing is called for events that change no figure.

    Args:
        projections: those that fold the log.
        state: the totals so far; default: none, before the first event.
        is_complete: False if events before the first that is counted are missing in `state`.
        on_failed: called once if counting raises, which then ends. Default: it raises into the fold.
    """

    def __init__(
        self,
        projections: Projections,
        state: State | None = None,
        *,
        is_complete: bool = True,
        on_failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._tracker = projections.tracker
        self._jobs = projections.jobs
        self.state = State() if state is None else state
        self.figures = self.state.figures
        """The sums of what was counted."""
        self._is_complete = is_complete
        self._on_failed = on_failed
        counts = self._counts()
        if on_failed is not None:
            counts = {event_class: self._safe(count) for event_class, count in counts.items()}
        projections.follow(counts)

    @classmethod
    def continued(cls, projections: Projections, stored: bytes) -> Totals:
        """Totals that go on from what `stored` returned; not complete if that is empty or this code cannot use it."""
        try:
            stored_format, state = _decode(stored)
        except Undecodable:
            stored_format, state = None, None
        is_usable = stored_format == FORMAT
        return cls(projections, state if is_usable else None, is_complete=is_usable)

    @property
    def complete_figures(self) -> Figures | None:
        """The same; None if events are missing in them."""
        return self.state.figures if self._is_complete else None

    def stored(self) -> bytes:
        """The totals as bytes for `continued`; empty if events are missing in them."""
        return msgspec.msgpack.encode((FORMAT, self.state)) if self._is_complete else b""

    def _counts(self) -> dict[type[e.Event], Callable[[Any, int, Subject], None]]:
        """Event class → what counts it."""
        of_extension = (e.ExtensionObserved, e.ExtensionDecided, e.ExtensionNoted)
        return {
            **dict.fromkeys(_COUNTED, self._one_more),
            **dict.fromkeys(of_extension, self._of_extension),
            e.ChunksEvicted: self._evicted,
            e.ChunksTainted: self._tainted,
            e.RequestArrived: self._arrived,
            e.RequestPreempted: self._preempted,
            e.RequestFinished: self._finished,
            e.LookupRequested: self._lookup_requested,
            e.LookupAnswered: self._answered,
            e.BlocksAllocated: self._allocated,
            e.LoadIssued: self._load_issued,
            e.LoadCompleted: self._load_completed,
            e.LoadFailed: self._load_failed,
            e.SaveCompleted: self._save_completed,
            e.SaveDeclined: self._save_declined,
            e.StepScheduled: self._step_scheduled,
            e.TransferReported: self._reported,
        }

    def _safe(self, count: Callable[[Any, int, Subject], None]) -> Callable[[Any, int, Subject], None]:
        def counted(event: e.Event, sequence: int, subject: Subject) -> None:
            if not self._is_complete:
                return
            try:
                count(event, sequence, subject)
            except BaseException as error:  # noqa: BLE001 -- a wrong figure must cost no request anything
                raise_if_unstoppable(error)
                self._is_complete = False
                if self._on_failed is not None:
                    self._on_failed(error)

        return counted

    def _one_more(self, event: e.Event, _sequence: int, _subject: Subject) -> None:
        name = _COUNTED[type(event)]
        setattr(self.figures, name, getattr(self.figures, name) + 1)

    def _of_extension(self, event: e.ExtensionEvent, _sequence: int, _subject: Subject) -> None:
        self.figures.num_extension_events += 1
        self.state.num_events_of[event.extension] = self.state.num_events_of.get(event.extension, 0) + 1

    # --- the life of a request -----------------------------------------------------------------

    def _arrived(self, event: e.RequestArrived, sequence: int, subject: Subject) -> None:
        self.figures.num_requests += 1
        self._finished(event, sequence, subject)  # the life before, if it has not ended

    def _preempted(self, event: e.RequestPreempted, _sequence: int, subject: Subject) -> None:
        self.figures.num_preemptions += 1
        request = subject.request
        if request is not None:
            self.state.returning.pop(request.ordinal, None)
            self.state.preempted_ns.setdefault(request.ordinal, event.time_ns)

    def _lookup_requested(self, event: e.LookupRequested, _sequence: int, subject: Subject) -> None:
        request = subject.request
        if request is not None and request.num_preemptions:
            num_retained = min(event.num_computed_tokens, request.num_tokens_before_preemption)
            self.state.returning[request.ordinal] = (num_retained, 0)

    def _answered(self, event: e.LookupAnswered, _sequence: int, _subject: Subject) -> None:
        self.figures.num_lookups += 1
        self.figures.num_tokens_offered = _sum(self.figures.num_tokens_offered, event.num_external_tokens)

    def _allocated(self, event: e.BlocksAllocated, _sequence: int, subject: Subject) -> None:
        answer = None if subject.request is None else subject.request.answer
        if answer is not None:  # without one it is the second phase of an asynchronous load, or a session's next turn
            self.figures.num_admissions += 1
            self.figures.num_tokens_queried += max(0, answer.num_tokens - answer.num_computed_tokens)
            self.figures.num_tokens_hit += max(0, min(event.num_external_tokens, answer.num_external_tokens))

    def _finished(self, _event: e.RequestEvent, _sequence: int, subject: Subject) -> None:
        if subject.request is not None:
            self.state.returning.pop(subject.request.ordinal, None)
            self.state.preempted_ns.pop(subject.request.ordinal, None)

    def _step_scheduled(self, event: e.StepScheduled, _sequence: int, _subject: Subject) -> None:
        for ordinal, num_computed_tokens, num_scheduled_tokens, _ in event.advanced:
            request = self._tracker.of(ordinal)
            if request is not None and request.num_preemptions:
                preempted_ns = self.state.preempted_ns.pop(ordinal, None)
                if preempted_ns is not None:
                    self.state.recovery_times.add(max(0, event.time_ns - preempted_ns))
                num_retained, num_recovered = self.state.returning.pop(ordinal, (0, 0))
                self.figures.num_tokens_retained += num_retained
                self.figures.num_tokens_recovered += num_recovered
                last = min(num_computed_tokens + num_scheduled_tokens, request.num_tokens_before_preemption)
                self.figures.num_tokens_recomputed += max(0, last - num_computed_tokens)

    # --- copies --------------------------------------------------------------------------------

    def _load_issued(self, event: e.LoadIssued, _sequence: int, subject: Subject) -> None:
        self.state.loading[event.job_id] = event.num_tokens
        request = subject.current
        if request is not None and event.ordinal in self.state.returning:
            num_retained, _ = self.state.returning[event.ordinal]
            last = min(event.first_token + event.num_tokens, request.num_tokens_before_preemption)
            self.state.returning[event.ordinal] = (num_retained, max(0, last - event.first_token))

    def _load_completed(self, event: e.LoadCompleted, _sequence: int, _subject: Subject) -> None:
        self.figures.num_tokens_loaded += self.state.loading.pop(event.job_id, 0)

    def _load_failed(self, event: e.LoadFailed, _sequence: int, _subject: Subject) -> None:
        self.state.loading.pop(event.job_id, None)
        self.figures.num_loads_failed += 1

    def _save_completed(self, _event: e.SaveCompleted, _sequence: int, subject: Subject) -> None:
        if subject.copy is not None:
            self.figures.num_chunks_saved += len(subject.copy.keys)

    def _evicted(self, event: e.ChunksEvicted, _sequence: int, _subject: Subject) -> None:
        self.figures.num_chunks_evicted += len(event.keys)

    def _tainted(self, event: e.ChunksTainted, _sequence: int, _subject: Subject) -> None:
        self.figures.num_chunks_tainted += len(event.keys)

    def _save_declined(self, event: e.SaveDeclined, _sequence: int, _subject: Subject) -> None:
        self.figures.num_chunks_declined += event.num_chunks

    def _reported(self, event: e.TransferReported, _sequence: int, _subject: Subject) -> None:
        job = next(filter(None, map(self._jobs.get, event.job_ids)), None)
        if job is None:
            return
        figures, is_load = self.figures, job.kind == "load"
        if is_load:
            figures.num_bytes_loaded = _sum(figures.num_bytes_loaded, sum(event.num_bytes))
            figures.load_duration_ns = _sum(figures.load_duration_ns, event.duration_ns)
        else:
            figures.num_bytes_saved = _sum(figures.num_bytes_saved, sum(event.num_bytes))
            figures.save_duration_ns = _sum(figures.save_duration_ns, event.duration_ns)
        if event.duration_ns:  # a copy that failed, or was not handed out, was not measured
            (self.state.load_times if is_load else self.state.save_times).add(event.duration_ns)
