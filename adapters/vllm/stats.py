"""Sends the connector's figures out of the engine core as plain data: changes of counters, and values of gauges.

vLLM takes the figures in each step (`Scheduler.make_stats`, `vllm/v1/core/sched/scheduler.py`, 0.32) and sends them to
the processes that serve `/metrics` and write a periodic log line. An idle engine runs no step and sends nothing. The
figures therefore have the time of the latest write to the event log, and not how long ago it was. This module must not
know Prometheus.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvledger.adapters.figures import DURATION_BOUNDS_NS, Figures
from kvledger.adapters.vllm.metric_names import (
    BY_EXTENSION,
    GAUGES,
    HISTOGRAMS,
    LABELS,
    LAST_WRITTEN,
    MISSED,
    REASONS_OF,
    RECOMPUTED,
)
from kvledger.storage.events import BacklogEventStore

if TYPE_CHECKING:
    from kvledger.adapters.vllm.event_log import OpenedLog
    from kvledger.adapters.vllm.scheduler_side import SchedulerSide

OF_LEDGER: Final = tuple(field.name for field in attrs.fields(Figures) if field.name not in LABELS)
_of_ledger: Final[Callable[[Figures], tuple[int, ...]]] = attrgetter(*OF_LEDGER)
_NS_BETWEEN_WRITES_SENT: Final = 1_000_000_000
"""If only figures about the log have changed, new stats wait until this many nanoseconds after the latest stats."""


class ConnectorStats(KVConnectorStats):
    """The changes of one interval and the values of the gauges: numbers and lists of numbers, which vLLM can serialize.

    Each list is about durations of one kind. It has the counts of all buckets (`DURATION_BOUNDS_NS`), and then the sums
    of all buckets in nanoseconds.
    """

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether nothing was collected."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counters of `other` to these counters, and take over its gauges."""
        for name, value in other.data.items():
            before = None if name in GAUGES else self.data.get(name)
            self.data[name] = value if before is None else _added(before, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures for vLLM's periodic log line, with the mean of each kind of duration in milliseconds."""
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


class StatsSource:
    """Computes how the figures have changed since the last call."""

    def __init__(self, side: SchedulerSide) -> None:
        self._side = side
        # No more labels than configured extensions.
        extensions = tuple(extension.name for extension in side.ledger.core.extensions)
        self._values_of_labels = {BY_EXTENSION: extensions, **REASONS_OF}
        labelled = (f"{counter}/{value}" for counter, values in self._values_of_labels.items() for value in values)
        self._names = (*OF_LEDGER, *labelled, "num_log_bytes_written", "num_events_lost")
        self._counts = (0,) * len(self._names)
        self._durations = {name: [0] * 2 * (len(DURATION_BOUNDS_NS) + 1) for name in HISTOGRAMS}
        self._gauges = dict.fromkeys(GAUGES, 0)
        self._sent_ns = 0

    def take(self) -> ConnectorStats | None:
        """Return the changes since the last call; None if nothing has changed.

        Also None if only the figures about the log have changed and the last stats are less than a second old.
        """
        journal, now_ns = self._side.journal, self._side.journal.now()
        is_new = journal.figures_changed or self._gauges["num_log_events_waiting"] > 0
        if not is_new and now_ns - self._sent_ns < _NS_BETWEEN_WRITES_SENT:
            return None
        journal.figures_changed, self._sent_ns = False, now_ns
        changed, gauges = self._take_changed(), self._take_gauges()
        if not (is_new or changed or gauges != self._gauges):
            return None
        self._gauges = gauges
        return ConnectorStats({**changed, **gauges})

    def _take_changed(self) -> dict[str, Any]:
        totals, store = self._side.journal.totals, _written(self._side.log)
        state = totals.state
        counts_by = {
            BY_EXTENSION: state.num_events_of,
            MISSED: state.num_tokens_missed_by,
            RECOMPUTED: state.num_tokens_recomputed_by,
        }
        labelled = (
            counts_by[counter].get(value, 0) for counter, values in self._values_of_labels.items() for value in values
        )
        of_log = (0, 0) if store is None else (store.num_bytes_written, store.num_events_lost)
        counts = (*_of_ledger(totals.figures), *labelled, *of_log)
        pairs = zip(self._names, counts, self._counts, strict=True)
        changed: dict[str, Any] = {name: now - before for name, now, before in pairs if now != before}
        self._counts = counts
        for name, before in self._durations.items():
            durations = getattr(state, name)
            now = [*durations.counts, *durations.sums_ns]
            if now != before:
                changed[name] = [*map(int.__sub__, now, before)]
                self._durations[name] = now
        return changed

    def _take_gauges(self) -> dict[str, int]:
        projections, store = self._side.ledger.projections, _written(self._side.log)
        slots = projections.slots
        return {
            "num_chunks_cached": len(projections.pool),
            "num_slots_used": slots.num_slots - slots.num_free,
            "num_slots": slots.num_slots,
            "num_jobs_in_flight": len(projections.jobs),
            "num_log_events_waiting": 0 if store is None else store.num_events_backlogged,
            LAST_WRITTEN: 0 if store is None else store.last_written_unix_ns,
            "is_disabled": int(self._side.journal.is_disabled),
        }


def _written(log: OpenedLog) -> BacklogEventStore | None:
    """Return the store that writes the log to files; None if the log is in memory."""
    return log.store if isinstance(log.store, BacklogEventStore) else None
