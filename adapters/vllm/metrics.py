"""The connector's figures for vLLM's `/metrics`: deltas of the totals projection, one Prometheus metric each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvledger.adapters.vllm.guard import guarded
from kvledger.lifecycle import Figures

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvledger.adapters.vllm.scheduler_side import SchedulerSide

COUNTERS: tuple[str, ...] = tuple(field.name for field in attrs.fields(Figures))
GAUGES = ("num_chunks_cached", "num_slots_used", "num_slots", "num_jobs_in_flight", "num_events_lost")
_BY_EXTENSION = "num_extension_events"
"""Reported as "num_extension_events/name", and shown with the label `extension`; no name has a slash."""

_DESCRIPTIONS = {
    "num_tokens_recovered": "Tokens of preempted requests loaded back from the host pool.",
    "num_tokens_recomputed": "Tokens computed before a preemption and again after it.",
    "num_tokens_retained": "Tokens of preempted requests still found in the local prefix cache.",
}


class ConnectorStats(KVConnectorStats):
    """Counter deltas and gauge values of one interval; plain numbers that survive serialization."""

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def is_empty(self) -> bool:
        """Whether nothing was collected."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add counters, replace gauges."""
        for name, value in other.data.items():
            self.data[name] = value if name in GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's periodic log line shows."""
        return {name: value for name, value in self.data.items() if value}


_NO_STATS: ConnectorStats | None = None


class StatsSource:
    """Takes the difference of the totals since the last call."""

    def __init__(self, side: SchedulerSide) -> None:
        self._side = side
        self._last: dict[str, int] = {}

    def hook_failed(self, hook: str, request_id: str, error: Exception) -> None:
        """Figures that cannot be taken are reported like any other failing hook."""
        self._side.hook_failed(hook, request_id, error)

    @guarded(default=_NO_STATS)
    def take(self) -> ConnectorStats | None:
        """The stats since the last call, or None where nothing changed."""
        if not self._side.journal.figures_changed:
            return None
        self._side.journal.figures_changed = False
        projections = self._side.ledger.projections
        totals = projections.totals
        now = {name: getattr(totals.figures, name) for name in COUNTERS if name != _BY_EXTENSION}
        for extension in projections.core.extensions:  # so there are no more labels than extensions are configured
            now[f"{_BY_EXTENSION}/{extension.name}"] = totals.state.num_events_of.get(extension.name, 0)
        data: dict[str, Any] = {
            name: value - self._last.get(name, 0) for name, value in now.items() if value != self._last.get(name, 0)
        }
        self._last = now
        slots = projections.chunks.slots
        data |= {
            "num_chunks_cached": len(projections.chunks),
            "num_slots_used": slots.num_slots - slots.num_free,
            "num_slots": slots.num_slots,
            "num_jobs_in_flight": len(projections.transfers),
            "num_events_lost": getattr(self._side.log.store, "num_events_lost", 0),
        }
        return ConnectorStats(data)


class ConnectorPrometheus(KVConnectorPromMetrics):
    """Registers `vllm:kvledger_*` through vLLM's own hook, labelled like its other metrics."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for names, kind in ((COUNTERS, Counter), (GAUGES, Gauge)):
            for name in names:
                self._metrics[name] = metric_types[kind](
                    name=f"vllm:kvledger_{name.removeprefix('num_')}",
                    documentation=_DESCRIPTIONS.get(name, name.replace("_", " ").capitalize() + "."),
                    labelnames=[*labelnames, "extension"] if name == _BY_EXTENSION else labelnames,
                )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval of one engine."""
        labels = self.per_engine_labelvalues[engine_idx]
        for figure, value in transfer_stats_data.items():
            name, _, extension = figure.partition("/")
            metric = self._metrics.get(name)
            if metric is None:
                continue
            child = metric.labels(*labels, *([extension] if name == _BY_EXTENSION else []))
            if name in GAUGES:
                child.set(value)
            else:
                child.inc(value)
