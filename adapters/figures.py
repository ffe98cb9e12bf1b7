"""Counters over the events of a log, for metrics and reports. No decision uses them, so they are not in the core.

The connector counts while it serves requests (`Totals`), and commands count while they read a log
(`tools/logs/totals.py`). Both find the request, the answer and the copy that belong to an event. This module defines
how the event changes the counters.

Tokens of a preempted request are counted in three ways. Recomputed: computed before the preemption and again after it.
Recovered: loaded from the host pool after the preemption. Retained: found in vLLM's own prefix cache after the
preemption.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, NamedTuple, Protocol, TypeVar

import attrs
import msgspec

from kvledger.lifecycle import Projections, Subject, raise_if_unstoppable
from kvledger.lifecycle import events as e
from kvledger.lifecycle.ranges import MAX_INT64, Count, Int64, JobId, LifeOrdinal, NumTokens, SumOfTokens, TimeNs
from kvledger.lifecycle.untrusted import Undecodable, msgpack_decoder

FORMAT: Final = 3
"""Version of stored totals, which are used only by code with the same version. Increase it if the counting changes."""


@attrs.define
class Figures:
    """Counters since the log was opened, in requests, tokens, chunks, pages, bytes and nanoseconds."""

    num_requests: Count = 0
    num_preemptions: Count = 0
    num_lookups: Count = 0
    """Answers to lookups. vLLM looks up a waiting request in every step, and each repeated answer counts."""
    num_tokens_offered: Int64 = 0
    """Tokens that the answers offer. The tokens of a repeated answer count again."""
    num_admissions: Count = 0
    """Number of times that a request got blocks after an answer."""
    num_tokens_queried: Int64 = 0
    """Tokens of the admitted requests, without the tokens in vLLM's own prefix cache."""
    num_tokens_hit: Int64 = 0
    """Tokens among `num_tokens_queried` that are loaded and not computed."""
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
    """Return the sum, limited to what fits into the 64 bits of a snapshot. A log may hold numbers that do not fit."""
    return max(-MAX_INT64, min(figure + more, MAX_INT64))


NOT_OFFERED: Final = "not_offered"
"""Reason of tokens in the pool that were not offered, because another load was in flight, or because the prefix in
vLLM's own cache ended within a block."""
NOT_LOADED: Final = "not_loaded"
"""Reason of tokens that were offered and not claimed. If tokens are recomputed, also the reason after a failed load."""
NO_LOOKUP: Final = "no_lookup"
"""Reason of tokens that were computed again after an allocation without a lookup."""
MISS_REASONS: Final = (*(reason.value for reason in e.MissReason), NOT_OFFERED, NOT_LOADED)
RECOMPUTE_REASONS: Final = (*MISS_REASONS, NO_LOOKUP)
"""Reasons why tokens are recomputed, as far as the answer shows. `adapters/tools/reasons` finds more in a log."""
_ENDS_OF_HITS: Final = frozenset({e.MissReason.COMPLETE, e.MissReason.MISSING, e.MissReason.SAVING})
"""The miss reasons that say why a hit ends. The others say why fewer tokens than the hit were offered."""

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
    """A histogram of durations: their number and sum per bucket. The sums make mean durations exact."""

    counts: _ByBucket[Count] = []
    sums_ns: _ByBucket[Int64] = []

    def __post_init__(self) -> None:
        """Set empty fields to zeros.

        The fields have no default factory: an index compares the layout of this class, which would contain the memory
        address of a factory.
        """
        num_buckets = len(DURATION_BOUNDS_NS) + 1
        self.counts = self.counts or [0] * num_buckets
        self.sums_ns = self.sums_ns or [0] * num_buckets

    def add(self, duration_ns: int) -> None:
        """Count one duration."""
        bucket = bisect_left(DURATION_BOUNDS_NS, duration_ns)
        self.counts[bucket] += 1
        self.sums_ns[bucket] = _sum(self.sums_ns[bucket], duration_ns)


class State(msgspec.Struct, forbid_unknown_fields=True):
    """The figures, and the data of earlier events that is needed to count later events."""

    figures: Figures = msgspec.field(default_factory=Figures)
    loading: dict[JobId, NumTokens] = {}
    """Job id of a load in flight → its tokens."""
    returning: dict[LifeOrdinal, tuple[NumTokens, SumOfTokens]] = {}
    """Life's ordinal → (tokens retained, tokens recovered). Kept from a preempted life's lookup until the life runs."""
    preempted_ns: dict[LifeOrdinal, TimeNs] = {}
    """Ordinal of a preempted life → time of its first preemption since it last ran."""
    load_times: Durations = msgspec.field(default_factory=Durations)
    """Durations of loads, as the slowest rank measured them."""
    save_times: Durations = msgspec.field(default_factory=Durations)
    recovery_times: Durations = msgspec.field(default_factory=Durations)
    """Durations from a preemption until a step schedules the request again."""
    num_events_of: dict[str, Count] = {}
    """Extension → the number of its events in `figures.num_extension_events`."""
    num_tokens_missed_by: dict[str, Count] = {}
    """Miss reason → tokens of admitted requests that are computed for this reason. The sum over all reasons is
    `figures.num_tokens_queried` minus `figures.num_tokens_hit`."""
    num_tokens_recomputed_by: dict[str, Count] = {}
    """One of `RECOMPUTE_REASONS` → tokens in `figures.num_tokens_recomputed` that have this reason."""


_decode = msgpack_decoder(tuple[int, State])


def encoded(state: State) -> bytes:
    """Return the totals as bytes."""
    return msgspec.msgpack.encode((FORMAT, state))


def decoded(stored: bytes) -> State | None:
    """Return the totals from bytes; None if `stored` is empty or this code cannot use it."""
    try:
        stored_format, state = _decode(stored)
    except Undecodable:
        return None
    return state if stored_format == FORMAT else None


# --- what an event adds -------------------------------------------------------------------------


class Request(Protocol):
    """The attributes of a request that figures need."""

    ordinal: int
    generation: int
    num_preemptions: int
    num_tokens_before_preemption: int


class Copy(Protocol):
    """The attributes of a copy that figures need."""

    keys: tuple[bytes, ...]

    @property
    def is_load(self) -> bool:
        """Whether the copy is a load; otherwise it is a save."""


class About(msgspec.Struct, frozen=True, gc=False):
    """The request, the answer and the copy that belong to an event. Made for each event that the connector counts."""

    request: Request | None = None
    """For an observation, its request as it was before the event. For a decision, the request that it names."""
    answer: e.LookupAnswered | None = None
    """For a `BlocksAllocated`, the answer that the allocation claims."""
    copy: Copy | None = None
    """The copy that the event settles. For a report, the first of the reported copies that are in flight."""


class Took(NamedTuple):
    """A duration that was added."""

    of: str
    """Name of the field of `State` to which the duration was added."""
    duration_ns: int


Add = Callable[[State, Any, About], Took | None]
"""Adds an event to the state; returns a duration if it added one."""


def _one_more(figure: str) -> Add:
    def add(state: State, _event: e.Event, _about: About) -> None:
        setattr(state.figures, figure, getattr(state.figures, figure) + 1)

    return add


def _of_extension(state: State, event: e.ExtensionEvent, _about: About) -> None:
    state.figures.num_extension_events += 1
    state.num_events_of[event.extension] = state.num_events_of.get(event.extension, 0) + 1


# --- the life of a request ----------------------------------------------------------------------


def _arrived(state: State, event: e.RequestArrived, about: About) -> None:
    state.figures.num_requests += 1
    _ended(state, event, about)  # the life before, if it has not ended


def _ended(state: State, _event: e.RequestEvent, about: About) -> None:
    if about.request is not None:
        state.returning.pop(about.request.ordinal, None)
        state.preempted_ns.pop(about.request.ordinal, None)


def _preempted(state: State, event: e.RequestPreempted, about: About) -> None:
    state.figures.num_preemptions += 1
    if about.request is not None:
        state.returning.pop(about.request.ordinal, None)
        state.preempted_ns.setdefault(about.request.ordinal, event.time_ns)


def _lookup_requested(state: State, event: e.LookupRequested, about: About) -> None:
    request = about.request
    if request is not None and request.num_preemptions:
        num_retained = min(event.num_computed_tokens, request.num_tokens_before_preemption)
        state.returning[request.ordinal] = (num_retained, 0)


def _answered(state: State, event: e.LookupAnswered, _about: About) -> None:
    state.figures.num_lookups += 1
    state.figures.num_tokens_offered = _sum(state.figures.num_tokens_offered, event.num_external_tokens)


def _allocated(state: State, event: e.BlocksAllocated, about: About) -> None:
    answer, figures = about.answer, state.figures
    if answer is not None:  # without one: the second phase of an asynchronous load, or a session's next turn
        figures.num_admissions += 1
        num_hit = max(0, min(event.num_external_tokens, answer.num_external_tokens))
        num_queried = max(0, answer.num_tokens - answer.num_computed_tokens)
        figures.num_tokens_queried = _sum(figures.num_tokens_queried, num_queried)
        figures.num_tokens_hit = _sum(figures.num_tokens_hit, num_hit)
        _add_reasons(state.num_tokens_missed_by, answer, answer.num_computed_tokens + num_hit, answer.num_tokens)


def _add_reasons(num_tokens_by: dict[str, int], answer: e.LookupAnswered | None, first: int, end: int) -> None:
    """Count the tokens from `first` to before `end` by the reason why each is computed, which `answer` shows."""
    if first >= end:
        return
    if answer is None:
        num_tokens_by[NO_LOOKUP] = num_tokens_by.get(NO_LOOKUP, 0) + end - first
        return
    offered_end = max(first, min(end, answer.num_computed_tokens + answer.num_external_tokens))
    hit_end = offered_end
    if answer.miss_reason in _ENDS_OF_HITS:
        hit_end = max(offered_end, min(end, answer.num_hit_tokens, answer.num_tokens - 1))
    for reason, num_tokens in (
        (NOT_LOADED, offered_end - first),
        (NOT_OFFERED, hit_end - offered_end),
        (answer.miss_reason, end - hit_end),
    ):
        if num_tokens and reason in MISS_REASONS:  # a log may contain any
            num_tokens_by[reason] = num_tokens_by.get(reason, 0) + num_tokens


def add_row(
    state: State,
    step: e.StepScheduled,
    row: tuple[int, int, int, int],
    request: Request,
    claimed: e.LookupAnswered | None,
) -> Took | None:
    """Add one request of a step to the figures, if the request was ever preempted.

    `row` is one of `step.advanced`; `claimed` is the answer that the request's last allocation claimed.
    """
    if not request.num_preemptions:
        return None
    figures = state.figures
    ordinal, num_computed_tokens, num_scheduled_tokens, _ = row
    num_retained, num_recovered = state.returning.pop(ordinal, (0, 0))
    figures.num_tokens_retained = _sum(figures.num_tokens_retained, num_retained)
    figures.num_tokens_recovered = _sum(figures.num_tokens_recovered, num_recovered)
    last = min(num_computed_tokens + num_scheduled_tokens, request.num_tokens_before_preemption)
    figures.num_tokens_recomputed = _sum(figures.num_tokens_recomputed, max(0, last - num_computed_tokens))
    _add_reasons(state.num_tokens_recomputed_by, claimed, num_computed_tokens, last)
    preempted_ns = state.preempted_ns.pop(ordinal, None)
    return None if preempted_ns is None else _took(state, "recovery_times", max(0, step.time_ns - preempted_ns))


def _took(state: State, of: str, duration_ns: int) -> Took:
    durations: Durations = getattr(state, of)
    durations.add(duration_ns)
    return Took(of, duration_ns)


# --- copies -------------------------------------------------------------------------------------


def _load_issued(state: State, event: e.LoadIssued, about: About) -> None:
    state.loading[event.job_id] = event.num_tokens
    request = about.request
    if request is not None and request.generation == event.generation and event.ordinal in state.returning:
        num_retained, _ = state.returning[event.ordinal]
        last = min(event.first_token + event.num_tokens, request.num_tokens_before_preemption)
        state.returning[event.ordinal] = (num_retained, max(0, last - event.first_token))


def _load_completed(state: State, event: e.LoadCompleted, _about: About) -> None:
    figures = state.figures
    figures.num_tokens_loaded = _sum(figures.num_tokens_loaded, state.loading.pop(event.job_id, 0))


def _load_failed(state: State, event: e.LoadFailed, _about: About) -> None:
    state.loading.pop(event.job_id, None)
    state.figures.num_loads_failed += 1


def _save_completed(state: State, _event: e.SaveCompleted, about: About) -> None:
    if about.copy is not None:
        state.figures.num_chunks_saved += len(about.copy.keys)


def _evicted(state: State, event: e.ChunksEvicted, _about: About) -> None:
    state.figures.num_chunks_evicted += len(event.keys)


def _tainted(state: State, event: e.ChunksTainted, _about: About) -> None:
    state.figures.num_chunks_tainted += len(event.keys)


def _declined(state: State, event: e.SaveDeclined, _about: About) -> None:
    state.figures.num_chunks_declined += event.num_chunks


def _reported(state: State, event: e.TransferReported, about: About) -> Took | None:
    copy, figures, num_bytes = about.copy, state.figures, sum(event.num_bytes)
    if copy is None:
        return None
    if copy.is_load:
        figures.num_bytes_loaded = _sum(figures.num_bytes_loaded, num_bytes)
        figures.load_duration_ns = _sum(figures.load_duration_ns, event.duration_ns)
    else:
        figures.num_bytes_saved = _sum(figures.num_bytes_saved, num_bytes)
        figures.save_duration_ns = _sum(figures.save_duration_ns, event.duration_ns)
    if not event.duration_ns:  # a copy that failed, or was not handed out, was not measured
        return None
    return _took(state, "load_times" if copy.is_load else "save_times", event.duration_ns)


ADDS: Mapping[type[e.Event], Add] = {
    e.SaveFailed: _one_more("num_saves_failed"),
    e.InvariantViolated: _one_more("num_violations"),
    e.HookFailed: _one_more("num_hook_failures"),
    e.ExtensionStopped: _one_more("num_extensions_stopped"),
    **dict.fromkeys((e.ExtensionObserved, e.ExtensionDecided, e.ExtensionNoted), _of_extension),
    e.ChunksEvicted: _evicted,
    e.ChunksTainted: _tainted,
    e.RequestArrived: _arrived,
    e.RequestPreempted: _preempted,
    e.RequestFinished: _ended,
    e.LookupRequested: _lookup_requested,
    e.LookupAnswered: _answered,
    e.BlocksAllocated: _allocated,
    e.LoadIssued: _load_issued,
    e.LoadCompleted: _load_completed,
    e.LoadFailed: _load_failed,
    e.SaveCompleted: _save_completed,
    e.SaveDeclined: _declined,
    e.TransferReported: _reported,
}
"""Event class → function that adds such an event. `add_row` adds a step, row by row."""


# --- counted live -------------------------------------------------------------------------------


class Totals:
    """Counts each event before `projections` fold it, so the request and the copy still have their earlier state.

    Refused observations are not counted. Events that change no figure are ignored.

    Args:
        projections: the projections whose events are counted.
        state: the totals so far; None: all figures are 0.
        is_complete: whether `state` includes every earlier event.
        on_failed: called once if counting raises; counting then stops. None: folding the event raises the error.
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
        self._is_complete = is_complete
        self._on_failed = on_failed
        adds: dict[type[e.Event], Add] = {
            **ADDS,
            e.StepScheduled: self._step_scheduled,
            e.TransferReported: self._reported,
        }
        projections.follow({event_class: self._counts(add) for event_class, add in adds.items()})

    @classmethod
    def continued(cls, projections: Projections, stored: bytes) -> Totals:
        """Return totals that continue from `stored`. They are incomplete if `stored` is empty or cannot be used."""
        state = decoded(stored)
        return cls(projections, state, is_complete=state is not None)

    @property
    def complete_figures(self) -> Figures | None:
        """The figures; None if events are missing in them."""
        return self.state.figures if self._is_complete else None

    def stored(self) -> bytes:
        """Return the totals as bytes for `continued`; empty if events are missing in them."""
        return encoded(self.state) if self._is_complete else b""

    def _counts(self, add: Add) -> Callable[[Any, int, Subject], None]:
        def count(event: e.Event, _sequence: int, subject: Subject) -> None:
            if not self._is_complete and self._on_failed is not None:
                return
            request = subject.request
            try:
                add(self.state, event, About(request, None if request is None else request.answer, subject.copy))
            except BaseException as error:
                if self._on_failed is None:
                    raise
                raise_if_unstoppable(error)  # a wrong figure must cost no request anything
                self._is_complete = False
                self._on_failed(error)

        return count

    def _step_scheduled(self, state: State, event: e.StepScheduled, _about: About) -> None:
        for row in event.advanced:
            request = self._tracker.of(row[0])
            if request is not None:
                add_row(state, event, row, request, request.claimed)

    def _reported(self, state: State, event: e.TransferReported, _about: About) -> None:
        copy = next(filter(None, map(self._jobs.get, event.job_ids)), None)
        _reported(state, event, About(copy=copy))
