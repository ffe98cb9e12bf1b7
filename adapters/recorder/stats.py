"""Figures of the wrapped connector on their way to vLLM's loggers, which ask a class that cannot know who is wrapped.

So they travel with the name of their class (`kv_connector/v1/metrics.py`, KVConnectorLogging.observe, 0.32).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

WRAPPED, FIGURES = "wrapped", "figures"


@dataclass
class RecordedStats(KVConnectorStats):
    """The wrapped connector's own figures, in an envelope."""

    wrapped: str = ""
    """The connector's class, as "module:Class"."""
    figures: KVConnectorStats = field(default_factory=KVConnectorStats)

    def to_dict(self) -> dict[str, Any]:
        """What crosses processes."""
        return {WRAPPED: self.wrapped, FIGURES: self.figures.to_dict()}

    def reset(self) -> None:
        """Forget the figures."""
        self.figures.reset()  # type: ignore[no-untyped-call]

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Both together; a `MultiConnector` adds up what has the same class, which two recorders of others have."""
        if isinstance(other, RecordedStats) and other.wrapped == self.wrapped:
            self.figures = self.figures.aggregate(other.figures)
        return self

    def reduce(self) -> dict[str, int | float]:
        """As the wrapped connector's own."""
        return self.figures.reduce()

    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return self.figures.is_empty()


def enveloped(connector: object, figures: KVConnectorStats | None) -> RecordedStats | None:
    """The figures with the name of who made them."""
    if figures is None:
        return None
    connector_class = type(connector)
    return RecordedStats(wrapped=f"{connector_class.__module__}:{connector_class.__qualname__}", figures=figures)


def opened(data: dict[str, Any] | None) -> KVConnectorStats | None:
    """What `to_dict` said, made anew by the class it names."""
    if not data:
        return None
    module_name, _, class_name = data[WRAPPED].partition(":")
    figures = getattr(importlib.import_module(module_name), class_name).build_kv_connector_stats(data[FIGURES])
    return None if figures is None else RecordedStats(wrapped=data[WRAPPED], figures=figures)


class RecordedPromMetrics:
    """Takes figures out of their envelope for the wrapped connector's own metrics."""

    def __init__(self, metrics: KVConnectorPromMetrics) -> None:
        self._metrics = metrics

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """As the wrapped connector's own."""
        self._metrics.observe(transfer_stats_data[FIGURES], engine_idx)
