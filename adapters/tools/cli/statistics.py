"""The figures of a log, folded in one pass and in bounded memory; several logs can be added up."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable

import attrs

from kvledger.adapters.figures import Figures
from kvledger.adapters.tools.cli.percentiles import Percentiles
from kvledger.adapters.tools.logs.describe import figures_of_extension
from kvledger.adapters.tools.logs.ending import num_open_requests
from kvledger.adapters.tools.logs.log import Batch
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.reasons import Accounts, RequestHistory, Sums
from kvledger.adapters.totals import Totals
from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events

MAX_TOP = 10
_PERCENTILES = ("load_time_ns", "save_time_ns", "recovery_time_ns", "events_per_step", "bytes_per_step")


@attrs.define
class Statistics:
    """What is counted. Times in nanoseconds."""

    num_logs: int = 0
    num_events: int = 0
    num_bytes: int = 0
    num_steps: int = 0
    num_tokens_scheduled: int = 0
    num_deferrals: int = 0
    num_open_requests: int = 0
    """At the end of what was read."""
    duration_ns: int = 0
    """From the first to the last moment that is counted."""
    figures: Figures = attrs.field(factory=Figures)
    sums: Sums = attrs.field(factory=Sums)
    differences: list[str] = attrs.field(factory=list)
    events: Counter[str] = attrs.field(factory=Counter)
    event_bytes: Counter[str] = attrs.field(factory=Counter)
    percentiles: dict[str, Percentiles] = attrs.field(factory=lambda: {name: Percentiles() for name in _PERCENTILES})
    """Of these, and of what extensions count and ends in `_ns`, behind the extension's name and a slash."""
    of_extensions: Counter[str] = attrs.field(factory=Counter)
    """What extensions count besides, named likewise."""
    top: list[tuple[int, str, int]] = attrs.field(factory=list)
    """(tokens recomputed, request id, ordinal), the most first."""

    def add(self, other: Statistics) -> None:
        """Count what was counted of another log, too."""
        for field in attrs.fields(Statistics):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, int | Counter):
                setattr(self, field.name, mine + theirs)
        for field in attrs.fields(Figures):
            setattr(self.figures, field.name, getattr(self.figures, field.name) + getattr(other.figures, field.name))
        self.sums.add(other.sums)
        self.differences += other.differences
        for name, percentiles in other.percentiles.items():
            self.percentiles.setdefault(name, Percentiles()).merge(percentiles)
        self.top = heapq.nlargest(MAX_TOP, [*self.top, *other.top])


class Counting:
    """Folds one log. Feed it batches in order; `result` at the end."""

    def __init__(self, core: Core, configuration: LedgerConfiguration, selection: Selection) -> None:
        self._selection = selection
        self._projections = core.new_projections(configuration)
        self._totals = Totals(self._projections)
        self._accounts = Accounts(configuration, request_id=selection.request_id, on_end=self._ended)
        self._is_foldable = True
        self._time_ns = 0
        self._first_ns: int | None = None
        self._before: tuple[Sums, Figures] | None = None
        self._since_step = [0, 0]
        self._preempted_ns: dict[str, int] = {}
        self._statistics = Statistics(num_logs=1)
        self._core = core
        self._counts: dict[type[e.Event], Callable[..., None]] = {
            e.StepScheduled: self._count_step,
            e.TransferReported: self._count_report,
            e.LookupDeferred: self._count_deferral,
            e.RequestPreempted: self._lose_blocks,
            e.PrefillCompleted: self._recover,
            e.RequestArrived: self._never_recover,
            e.RequestFinished: self._never_recover,
            **dict.fromkeys((e.ExtensionObserved, e.ExtensionNoted, e.ExtensionDecided), self._count_of_extension),
        }

    def take(self, batch: Batch) -> None:
        """Take what one frame holds."""
        has_step = False
        if batch.gap is not None:
            self._accounts.lose()
        for sequence, event in batch.numbered():
            time_ns = getattr(event, "time_ns", None)
            self._time_ns = self._time_ns if time_ns is None else time_ns
            if sequence >= self._selection.first_sequence:
                self._begin()
                has_step |= isinstance(event, e.StepScheduled)
                if self._is_selected(event):
                    self._count(event)
            self._fold(sequence, event)
        if self._before is not None and self._selection.request_id is None:
            self._count_frame(batch, has_step=has_step)

    def result(self) -> Statistics:
        """Everything that was counted."""
        result = self._statistics
        self._begin()
        before_sums, before_figures = self._before or (Sums(), Figures())
        sums, figures = self._accounts.sums(), self._totals.figures
        is_comparable = self._is_foldable and self._selection.request_id is None
        result.differences = sums.differences(figures if is_comparable else None)
        for story in self._accounts.histories:
            self._ended(story)
        result.sums = sums.since(before_sums)
        for field in attrs.fields(Figures):
            setattr(result.figures, field.name, getattr(figures, field.name) - getattr(before_figures, field.name))
        result.num_open_requests = num_open_requests(self._projections)
        result.duration_ns = self._time_ns - (self._first_ns or 0)
        result.top = heapq.nlargest(MAX_TOP, result.top)
        return result

    @property
    def is_foldable(self) -> bool:
        """Whether every event could be folded, so that the reasons could be compared with the totals."""
        return self._is_foldable

    def _begin(self) -> None:
        """The selection begins: what was counted before is subtracted in the end."""
        if self._before is None:
            self._before = (self._accounts.sums(), attrs.evolve(self._totals.figures))
            self._first_ns = self._time_ns

    def _fold(self, sequence: int, event: e.Event) -> None:
        self._accounts.take(sequence, event)
        if self._is_foldable:
            try:
                self._projections.fold(event, sequence)
            except Exception:  # noqa: BLE001 -- a forged log; what needs no state is still counted
                self._is_foldable = False

    def _is_selected(self, event: e.Event) -> bool:
        wanted = self._selection.request_id
        if wanted is None:
            return True
        if isinstance(event, e.TransferReported):
            jobs = filter(None, map(self._projections.jobs.get, event.job_ids))
            return any(job.request_id == wanted for job in jobs)
        return getattr(event, "request_id", None) == wanted

    def _count(self, event: e.Event) -> None:
        statistics = self._statistics
        statistics.num_events += 1
        statistics.events[event.id] += 1
        statistics.event_bytes[event.id] += len(encode_events([event])) - 1
        count = self._counts.get(type(event))
        if count is not None:
            count(event)

    def _count_step(self, event: e.StepScheduled) -> None:
        self._statistics.num_steps += 1
        self._statistics.num_tokens_scheduled += event.num_scheduled_tokens

    def _count_report(self, event: e.TransferReported) -> None:
        job = next(filter(None, map(self._projections.jobs.get, event.job_ids)), None)
        if job is not None and event.duration_ns:  # nobody says how long it took in a log of another connector
            name = "load_time_ns" if job.kind == "load" else "save_time_ns"
            self._statistics.percentiles[name].add(event.duration_ns)

    def _count_of_extension(self, event: e.ExtensionEvent) -> None:
        for what, amount in figures_of_extension(event, self._core).items():
            name = f"{event.extension}/{what}"
            if what.endswith("_ns"):
                self._statistics.percentiles.setdefault(name, Percentiles()).add(amount)
            else:
                self._statistics.of_extensions[name] += amount

    def _count_deferral(self, _event: e.LookupDeferred) -> None:
        self._statistics.num_deferrals += 1

    def _lose_blocks(self, event: e.RequestPreempted) -> None:
        self._preempted_ns.setdefault(event.request_id, event.time_ns)

    def _recover(self, event: e.PrefillCompleted) -> None:
        since_ns = self._preempted_ns.pop(event.request_id, None)
        if since_ns is not None:
            self._statistics.percentiles["recovery_time_ns"].add(self._time_ns - since_ns)

    def _never_recover(self, event: e.RequestArrived | e.RequestFinished) -> None:
        self._preempted_ns.pop(event.request_id, None)

    def _count_frame(self, batch: Batch, *, has_step: bool) -> None:
        num_bytes = batch.end_offset - batch.offset
        self._statistics.num_bytes += num_bytes
        self._since_step[0] += len(batch.events)
        self._since_step[1] += num_bytes
        if has_step:
            self._statistics.percentiles["events_per_step"].add(self._since_step[0])
            self._statistics.percentiles["bytes_per_step"].add(self._since_step[1])
            self._since_step = [0, 0]

    def _ended(self, history: RequestHistory) -> None:
        if history.sums.num_recomputed and self._before is not None:
            self._statistics.top.append((history.sums.num_recomputed, history.request_id, history.ordinal))
            if len(self._statistics.top) > 8 * MAX_TOP:
                self._statistics.top = heapq.nlargest(MAX_TOP, self._statistics.top)
