"""Sums over the whole log: the figures for metrics and reports.

Recomputed means computed before a preemption and again after it; recovered means loaded from the host pool
on the way back; retained means still found in vLLM's own prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections import Projection
from kvledger.lifecycle.projections.tracker import RequestTracker
from kvledger.lifecycle.projections.transfers import JobKind, Transfers


@attrs.define
class Figures:
    """Counters since the log was opened, in requests, tokens, chunks, pages, bytes and nanoseconds."""

    num_requests: int = 0
    num_preemptions: int = 0
    num_lookups: int = 0
    num_tokens_hit: int = 0
    num_tokens_loaded: int = 0
    num_tokens_recovered: int = 0
    num_tokens_retained: int = 0
    num_tokens_recomputed: int = 0
    num_chunks_saved: int = 0
    num_chunks_evicted: int = 0
    num_chunks_declined: int = 0
    num_chunks_tainted: int = 0
    num_bytes_saved: int = 0
    num_bytes_loaded: int = 0
    save_duration_ns: int = 0
    load_duration_ns: int = 0
    num_loads_failed: int = 0
    num_saves_failed: int = 0
    num_violations: int = 0
    num_hook_failures: int = 0
    num_extension_events: int = 0
    num_extensions_stopped: int = 0


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
    loading: dict[int, int] = {}
    """Load under way -> its tokens."""
    returning: dict[int, tuple[int, int]] = {}
    """Life of a preempted request that was looked up again -> tokens retained and recovered, until a step runs."""
    num_events_of: dict[str, int] = {}
    """Extension -> how many of `figures.num_extension_events` are its own."""


class Totals(Projection):
    """Folds every event that counts into `figures`. Registered before the tracker, to see states as they were."""

    def __init__(self, tracker: RequestTracker, transfers: Transfers) -> None:
        self._tracker = tracker
        self._transfers = transfers
        self.state = State()

    @property
    def figures(self) -> Figures:
        """The sums so far."""
        return self.state.figures

    @on(*_COUNTED)
    def _count(self, event: e.Event, _sequence: int) -> None:
        name = _COUNTED[type(event)]
        setattr(self.figures, name, getattr(self.figures, name) + 1)

    @on(e.ExtensionObserved, e.ExtensionDecided, e.ExtensionNoted)
    def _of_extension(self, event: e.ExtensionEvent, _sequence: int) -> None:
        self.figures.num_extension_events += 1
        self.state.num_events_of[event.extension] = self.state.num_events_of.get(event.extension, 0) + 1

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived, sequence: int) -> None:
        self.figures.num_requests += 1
        self._gone(event, sequence)

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted, sequence: int) -> None:
        self.figures.num_preemptions += 1
        self._gone(event, sequence)

    @on(e.LookupRequested)
    def _lookup_requested(self, event: e.LookupRequested, _sequence: int) -> None:
        record = self._tracker.get(event.request_id)
        if record is not None and record.num_preemptions:
            num_retained = min(event.num_computed_tokens, record.num_tokens_before_preemption)
            self.state.returning[record.ordinal] = (num_retained, 0)

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered, _sequence: int) -> None:
        self.figures.num_lookups += 1
        self.figures.num_tokens_hit += event.num_external_tokens

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued, _sequence: int) -> None:
        self.state.loading[event.job_id] = event.num_tokens
        record = self._tracker.in_generation(event)
        if record is not None and event.ordinal in self.state.returning:
            num_retained, _ = self.state.returning[event.ordinal]
            last = min(event.first_token + event.num_tokens, record.num_tokens_before_preemption)
            self.state.returning[event.ordinal] = (num_retained, max(0, last - event.first_token))

    @on(e.RequestFinished)
    def _gone(self, event: e.RequestEvent, _sequence: int) -> None:
        record = self._tracker.get(event.request_id)
        if record is not None:
            self.state.returning.pop(record.ordinal, None)

    @on(e.LoadCompleted)
    def _load_completed(self, event: e.LoadCompleted, _sequence: int) -> None:
        self.figures.num_tokens_loaded += self.state.loading.pop(event.job_id, 0)

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled, _sequence: int) -> None:
        for ordinal, num_computed_tokens, num_scheduled_tokens, _ in event.advanced:
            record = self._tracker.of(ordinal)
            if record is not None and record.num_preemptions:
                num_retained, num_recovered = self.state.returning.pop(ordinal, (0, 0))
                self.figures.num_tokens_retained += num_retained
                self.figures.num_tokens_recovered += num_recovered
                last = min(num_computed_tokens + num_scheduled_tokens, record.num_tokens_before_preemption)
                self.figures.num_tokens_recomputed += max(0, last - num_computed_tokens)

    @on(e.TransferReported)
    def _reported(self, event: e.TransferReported, _sequence: int) -> None:
        job = next(filter(None, map(self._transfers.get, event.job_ids)), None)
        if job is None:
            return
        figures = self.figures
        if job.kind is JobKind.LOAD:
            figures.num_bytes_loaded += sum(event.num_bytes)
            figures.load_duration_ns += event.duration_ns
        else:
            figures.num_bytes_saved += sum(event.num_bytes)
            figures.save_duration_ns += event.duration_ns

    @on(e.SaveCompleted)
    def _save_completed(self, event: e.SaveCompleted, _sequence: int) -> None:
        job = self._transfers.get(event.job_id)
        if job is not None:
            self.figures.num_chunks_saved += len(job.keys)

    @on(e.SaveDeclined)
    def _save_declined(self, event: e.SaveDeclined, _sequence: int) -> None:
        self.figures.num_chunks_declined += event.num_chunks

    @on(e.LoadFailed)
    def _load_failed(self, event: e.LoadFailed, _sequence: int) -> None:
        self.state.loading.pop(event.job_id, None)
        self.figures.num_loads_failed += 1
