"""Carries the wrapped connector's figures to vLLM's loggers, together with the name of the connector's class.

The loggers call a class method (`kv_connector/v1/metrics.py`, KVConnectorLogging.observe, 0.32). Without the name, the
recorder's class would not know which connector is wrapped.
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
        """Return the figures in a form that can be sent to another process."""
        return {WRAPPED: self.wrapped, FIGURES: self.figures.to_dict()}

    def reset(self) -> None:
        """Reset the figures."""
        self.figures.reset()  # type: ignore[no-untyped-call]

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the figures in `other`, if their envelope names the same connector class.

        All recorders have the same class. `MultiConnector` therefore passes the envelopes of all its recorders here.
        """
        if isinstance(other, RecordedStats) and other.wrapped == self.wrapped:
            self.figures = self.figures.aggregate(other.figures)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the reduced figures of the wrapped connector."""
        return self.figures.reduce()

    def is_empty(self) -> bool:
        """Whether there are no figures."""
        return self.figures.is_empty()


def enveloped(connector: object, figures: KVConnectorStats | None) -> RecordedStats | None:
    """Put the figures of `connector` into an envelope; None if there are no figures."""
    if figures is None:
        return None
    connector_class = type(connector)
    return RecordedStats(wrapped=f"{connector_class.__module__}:{connector_class.__qualname__}", figures=figures)


def opened(data: dict[str, Any] | None) -> KVConnectorStats | None:
    """Rebuild an envelope from a result of `to_dict`. The connector class named in it rebuilds the figures."""
    if not data:
        return None
    module_name, _, class_name = data[WRAPPED].partition(":")
    figures = getattr(importlib.import_module(module_name), class_name).build_kv_connector_stats(data[FIGURES])
    return None if figures is None else RecordedStats(wrapped=data[WRAPPED], figures=figures)


class RecordedPromMetrics:
    """Takes figures out of their envelope and passes them to the wrapped connector's metrics."""

    def __init__(self, metrics: KVConnectorPromMetrics) -> None:
        self._metrics = metrics

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Forward the wrapped connector's figures."""
        self._metrics.observe(transfer_stats_data[FIGURES], engine_idx)
