"""Carries the wrapped connector's figures to vLLM's loggers, with the name of the connector's class.

The loggers call a class method (`kv_connector/v1/metrics.py`, KVConnectorLogging.observe, 0.32), and the recorder's
class does not know which connector is wrapped.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

WRAPPED, FIGURES = "wrapped", "figures"


@dataclass
class RecordedStats(KVConnectorStats):
    """Envelope with the wrapped connector's figures."""

    wrapped: str = ""
    """The connector's class, as "module:Class"."""
    figures: KVConnectorStats = field(default_factory=KVConnectorStats)

    def to_dict(self) -> dict[str, Any]:
        """Return a form that can cross processes."""
        return {WRAPPED: self.wrapped, FIGURES: self.figures.to_dict()}

    def reset(self) -> None:
        """Reset the figures."""
        self.figures.reset()  # type: ignore[no-untyped-call]

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add figures of the same connector. `MultiConnector` adds up all recorders, which share this class."""
        if isinstance(other, RecordedStats) and other.wrapped == self.wrapped:
            self.figures = self.figures.aggregate(other.figures)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what the wrapped connector's figures return."""
        return self.figures.reduce()

    def is_empty(self) -> bool:
        """Whether there are no figures."""
        return self.figures.is_empty()


def enveloped(connector: object, figures: KVConnectorStats | None) -> RecordedStats | None:
    """Put figures into an envelope."""
    if figures is None:
        return None
    connector_class = type(connector)
    return RecordedStats(wrapped=f"{connector_class.__module__}:{connector_class.__qualname__}", figures=figures)


def opened(data: dict[str, Any] | None) -> KVConnectorStats | None:
    """Rebuild figures from `to_dict`, by the class that it names."""
    if not data:
        return None
    module_name, _, class_name = data[WRAPPED].partition(":")
    figures = getattr(importlib.import_module(module_name), class_name).build_kv_connector_stats(data[FIGURES])
    return None if figures is None else RecordedStats(wrapped=data[WRAPPED], figures=figures)


class RecordedPromMetrics:
    """Passes figures without the envelope to the wrapped connector's metrics."""

    def __init__(self, metrics: KVConnectorPromMetrics) -> None:
        self._metrics = metrics

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Forward the wrapped connector's figures."""
        self._metrics.observe(transfer_stats_data[FIGURES], engine_idx)
