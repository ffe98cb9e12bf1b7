"""The connector's figures on their way out of the engine core's process: differences since the last time, plain data.

vLLM takes them in each step (`Scheduler.make_stats`, `vllm/v1/core/sched/scheduler.py`, 0.32), and sends them to the
processes that serve `/metrics` and log a line now and then. An engine that is idle takes no step and sends nothing, so
what grows old by itself is sent as a point in time. It must not know Prometheus.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvledger.adapters.vllm.guard import guarded
from kvledger.adapters.vllm.metric_names import BY_EXTENSION, GAUGES, HISTOGRAMS, LAST_WRITTEN
from kvledger.lifecycle import Figures
from kvledger.storage.events import BacklogEventStore

if TYPE_CHECKING:
    from kvledger.adapters.vllm.event_log import OpenedLog
    from kvledger.adapters.vllm.scheduler_side import SchedulerSide

OF_LEDGER: Final = tuple(field.name for field in attrs.fields(Figures) if field.name != BY_EXTENSION)
_NS_BETWEEN_WRITES_SENT: Final = 1_000_000_000
"""In steps that change nothing else."""


class ConnectorStats(KVConnectorStats):
    """What changed in one interval, and gauges: numbers and lists of them, which survive serialization.

    Of durations the list has the counts of all buckets (`DURATION_BOUNDS_NS`), and then their sums in nanoseconds.
    """

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether nothing was collected."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what counts, replace gauges."""
        for name, value in other.data.items():
            before = None if name in GAUGES else self.data.get(name)
            self.data[name] = value if before is None else _added(before, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's periodic log line shows; of durations their mean."""
        shown: dict[str, int | float] = {}
        for name, value in self.data.items():
            if isinstance(value, list):
                middle = len(value) // 2
                num_times, sum_ns = sum(value[:middle]), sum(value[middle:])
                if num_times:
                    shown[f"mean_{name.removesuffix('s')}_ms"] = round(sum_ns / num_times / 1e6, 3)
            elif value and name != LAST_WRITTEN:
                shown[name] = value
        return shown


def _added(one: Any, other: Any) -> Any:
    return [*map(int.__add__, one, other)] if isinstance(one, list) else one + other


_NO_STATS: ConnectorStats | None = None


class StatsSource:
    """Takes the difference of the totals since the last call."""

    def __init__(self, side: SchedulerSide) -> None:
        self._side = side
        self._last: dict[str, Any] = {}
        self._sent_ns = 0

    def hook_failed(self, hook: str, request_id: str, error: Exception) -> None:
        """Figures that cannot be taken are reported like any other failing hook."""
        self._side.hook_failed(hook, request_id, error)

    @guarded(default=_NO_STATS)
    def take(self) -> ConnectorStats | None:
        """The stats since the last call, or None where nothing changed but, within a second, the log."""
        journal = self._side.journal
        is_new = journal.figures_changed or journal.log.is_behind or bool(self._last.get("num_log_events_waiting"))
        if not is_new and journal.now() - self._sent_ns < _NS_BETWEEN_WRITES_SENT:
            return None
        journal.figures_changed = False
        self._sent_ns = journal.now()
        before, self._last = self._last, self._now()
        if not is_new and self._last == before:
            return None
        data: dict[str, Any] = {name: self._last[name] for name in GAUGES}
        for name, value in self._last.items():
            if name not in GAUGES and (changed := _changed(value, before.get(name))):
                data[name] = changed
        return ConnectorStats(data)

    def _now(self) -> dict[str, Any]:
        projections = self._side.ledger.projections
        totals, slots = projections.totals, projections.chunks.slots
        now: dict[str, Any] = {name: getattr(totals.figures, name) for name in OF_LEDGER}
        for extension in projections.core.extensions:  # so there are no more labels than extensions are configured
            now[f"{BY_EXTENSION}/{extension.name}"] = totals.state.num_events_of.get(extension.name, 0)
        for name in HISTOGRAMS:
            durations = getattr(totals.state, name)
            now[name] = [*durations.counts, *durations.sums_ns]
        return now | {
            "num_chunks_cached": len(projections.chunks),
            "num_slots_used": slots.num_slots - slots.num_free,
            "num_slots": slots.num_slots,
            "num_jobs_in_flight": len(projections.transfers),
            "is_disabled": int(self._side.journal.is_disabled),
            **of_log(self._side.log),
        }


def of_log(log: OpenedLog) -> dict[str, int]:
    """What became of the log so far; of one in memory nothing is written."""
    store = log.store
    if not isinstance(store, BacklogEventStore):
        return {"num_log_bytes_written": 0, "num_events_lost": 0, "num_log_events_waiting": 0, LAST_WRITTEN: 0}
    return {
        "num_log_bytes_written": store.num_bytes_written,
        "num_events_lost": store.num_events_lost,
        "num_log_events_waiting": store.num_events_backlogged,
        LAST_WRITTEN: store.last_written_unix_ns,
    }


def _changed(now: Any, before: Any) -> Any:
    """The difference; nothing where there is none."""
    if now == before:
        return None
    if isinstance(now, list):
        difference = [*map(int.__sub__, now, before or [0] * len(now))]
        return difference if any(difference) else None
    return now - (before or 0)
