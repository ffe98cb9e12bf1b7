"""Figures of a log, counted in one pass and in bounded memory. The figures of several logs can be added up."""

from __future__ import annotations

import heapq
from collections import Counter

import attrs
import msgspec

from kvledger.adapters.figures import Figures, Took
from kvledger.adapters.tools.cli.percentiles import Percentiles
from kvledger.adapters.tools.logs.describe import figures_of_extension
from kvledger.adapters.tools.logs.log import Batch
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.totals import LogTotals
from kvledger.adapters.tools.pool_sizes import Estimate, of_log
from kvledger.adapters.tools.reasons import Accounts, RequestHistory, Sums
from kvledger.lifecycle import Core, RequestState
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events
from kvledger.lifecycle.reader import Life, Model, Visitor, Visits

MAX_TOP = 10
_DURATIONS = {
    "load_times": "load_time_ns",
    "save_times": "save_time_ns",
    "recovery_times": "recovery_time_ns",
}
"""Kind of duration in the totals → its name in `Statistics.percentiles`."""
_QUEUED = "queue_time_ns"
_PERCENTILES = (_QUEUED, *_DURATIONS.values(), "events_per_step", "bytes_per_step")


@attrs.define
class Statistics:
    """Figures of one log, or of several. Times are in nanoseconds."""

    num_logs: int = 0
    num_events: int = 0
    num_bytes: int = 0
    num_steps: int = 0
    num_tokens_scheduled: int = 0
    num_deferrals: int = 0
    num_open_requests: int = 0
    """Number of requests that had not ended at the last event that was read."""
    duration_ns: int = 0
    """Time from the first to the last counted event."""
    figures: Figures = attrs.field(factory=Figures)
    sums: Sums = attrs.field(factory=Sums)
    spent: Counter[str] = attrs.field(factory=Counter)
    """Field of `Spent` → sum over the requests, in nanoseconds."""
    events: Counter[str] = attrs.field(factory=Counter)
    event_bytes: Counter[str] = attrs.field(factory=Counter)
    percentiles: dict[str, Percentiles] = attrs.field(factory=lambda: {name: Percentiles() for name in _PERCENTILES})
    """Name → percentiles. Includes figures of extensions, named `extension/figure`, if the name ends in `_ns`."""
    of_extensions: Counter[str] = attrs.field(factory=Counter)
    """`extension/figure` → sum, for the figures of extensions that are not in `percentiles`."""
    top: list[tuple[int, str, int]] = attrs.field(factory=list)
    """(tokens recomputed, request id, ordinal) of the requests that recomputed the most tokens, in descending order."""
    pool: Estimate = attrs.field(factory=Estimate)

    @property
    def num_queued(self) -> int:
        """Number of requests that have left the queue."""
        return self.percentiles[_QUEUED].count

    def add(self, other: Statistics) -> None:
        """Add the figures of another log."""
        for field in attrs.fields(Statistics):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, int | Counter):
                setattr(self, field.name, mine + theirs)
        for field in attrs.fields(Figures):
            setattr(self.figures, field.name, getattr(self.figures, field.name) + getattr(other.figures, field.name))
        self.sums.add(other.sums)
        for name, percentiles in other.percentiles.items():
            self.percentiles.setdefault(name, Percentiles()).merge(percentiles)
        self.top = heapq.nlargest(MAX_TOP, [*self.top, *other.top])
        self.pool = self.pool.with_other(other.pool)


class Counting(Visitor[Model]):
    """Counts the events of a log, and collects its totals and reasons. Call `result` at the end.

    Pass `visitors` to a reader without changing their order. At the first selected event, this class stores what the
    other visitors have counted so far. It therefore must get this event before the other visitors.
    """

    needs = ("lives", "copies")

    def __init__(self, model: Model, core: Core, selection: Selection) -> None:
        super().__init__(model)
        self._totals = LogTotals(model, on_took=self._took)
        self._accounts = Accounts(model, request_id=selection.request_id, on_end=self._explained)
        self._pool_sizes, why_not = of_log(model, core, selection)
        self._core = core
        self._selection = selection
        self._first_ns = 0
        self._before: tuple[Sums, Figures] | None = None
        """Sums and figures of the events before the selection; None until the selection begins."""
        self._since_step = [0, 0]
        self._has_step = False
        """Whether the current frame has a step."""
        self._statistics = Statistics(num_logs=1, pool=Estimate(why_not=why_not))

    @property
    def visitors(self) -> tuple[Visitor[Model], ...]:
        """This visitor, and the visitors that it uses."""
        return self, self._totals, self._accounts, *([] if self._pool_sizes is None else [self._pool_sizes])

    def visits(self) -> Visits:
        """Visit every event."""
        return [(event_class, self._take) for event_class in e.STANDARD_EVENTS.values()]

    def ended(self, _life: Life) -> None:
        """Begin the selection if the life ends at the first selected event."""
        self._reach()

    def end_frame(self, batch: Batch) -> None:
        """Count the frame whose events were just read."""
        if self._before is None or self._selection.request_id is not None:
            return
        num_bytes = batch.end_offset - batch.offset
        self._statistics.num_bytes += num_bytes
        self._since_step[0] += len(batch.events)
        self._since_step[1] += num_bytes
        if self._has_step:
            self._statistics.percentiles["events_per_step"].add(self._since_step[0])
            self._statistics.percentiles["bytes_per_step"].add(self._since_step[1])
            self._since_step, self._has_step = [0, 0], False

    def result(self) -> Statistics:
        """Return everything that was counted."""
        result = self._statistics
        before_sums, before_figures = self._begin()
        sums, figures = self._accounts.sums(), self._totals.figures
        for history in self._accounts.histories:
            self._explained(history)
        result.sums = sums.since(before_sums)
        for field in attrs.fields(Figures):
            setattr(result.figures, field.name, getattr(figures, field.name) - getattr(before_figures, field.name))
        result.num_open_requests = self.model.lives.num_open
        result.duration_ns = self.moment.time_ns - self._first_ns
        result.top = heapq.nlargest(MAX_TOP, result.top)
        if self._pool_sizes is not None:
            result.pool = self._pool_sizes.estimate()
        return result

    def _begin(self) -> tuple[Sums, Figures]:
        """Begin the selection if it has not begun. Return the sums and figures of the events before the selection.

        `result` subtracts these sums and figures from the sums and figures of the whole log.
        """
        if self._before is None:
            self._before = (self._accounts.sums(), attrs.evolve(self._totals.figures))
            self._first_ns = self.moment.time_ns
        return self._before

    def _reach(self) -> bool:
        """Whether the selection has begun. At the first selected event, this method begins the selection."""
        is_inside = self.moment.sequence >= self._selection.first_sequence
        if is_inside:
            self._begin()
        return is_inside

    def _take(self, event: e.Event) -> None:
        if self._reach():
            self._has_step |= isinstance(event, e.StepScheduled)
            if self._is_selected(event):
                self._count(event)

    def _is_selected(self, event: e.Event) -> bool:
        wanted = self._selection.request_id
        if wanted is None:
            return True
        if isinstance(event, e.TransferReported):
            return any(copy.request_id == wanted for copy in filter(None, map(self.model.copies.get, event.job_ids)))
        return getattr(event, "request_id", None) == wanted

    def _count(self, event: e.Event) -> None:
        statistics = self._statistics
        statistics.num_events += 1
        statistics.events[event.id] += 1
        statistics.event_bytes[event.id] += len(encode_events([event])) - 1
        match event:
            case e.StepScheduled():
                statistics.num_steps += 1
                statistics.num_tokens_scheduled += event.num_scheduled_tokens
            case e.LookupDeferred():
                statistics.num_deferrals += 1
            case e.PrefillAdvanced() | e.PrefillCompleted() | e.RequestPreempted():
                life = self.moment.life
                was_queued = self.moment.state_before is RequestState.NEW
                if was_queued and life is not None and life.has_known_beginning and life.state is not RequestState.NEW:
                    statistics.percentiles[_QUEUED].add(life.spent.queued_ns)
            case e.ExtensionObserved() | e.ExtensionNoted() | e.ExtensionDecided():
                self._count_of_extension(event)

    def _count_of_extension(self, event: e.ExtensionEvent) -> None:
        for what, amount in figures_of_extension(event, self._core).items():
            name = f"{event.extension}/{what}"
            if what.endswith("_ns"):
                self._statistics.percentiles.setdefault(name, Percentiles()).add(amount)
            else:
                self._statistics.of_extensions[name] += amount

    def _took(self, took: Took, request_id: str) -> None:
        """Add to the percentiles the duration of a load, a save or a recovery."""
        if self._before is None:
            return
        event, wanted = self.moment.event, self._selection.request_id
        if wanted in {None, request_id} or (isinstance(event, e.TransferReported) and self._is_selected(event)):
            self._statistics.percentiles[_DURATIONS[took.of]].add(took.duration_ns)

    def _explained(self, history: RequestHistory) -> None:
        if self._before is None:
            return
        if history.spent is not None:
            self._statistics.spent.update(msgspec.structs.asdict(history.spent))
        if history.sums.num_recomputed:
            self._statistics.top.append((history.sums.num_recomputed, history.request_id, history.ordinal))
            if len(self._statistics.top) > 8 * MAX_TOP:
                self._statistics.top = heapq.nlargest(MAX_TOP, self._statistics.top)
