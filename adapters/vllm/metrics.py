"""Registers the metrics `vllm:kvledger_*` for vLLM's `/metrics`, and sets them from the figures that `stats.py` sends.

Every series exists from the start, with the value 0. Without that, alerts would miss the first increase of a counter,
because `increase()` needs an earlier sample. Units are Prometheus's base units, seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs
from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvledger.adapters.figures import DURATION_BOUNDS_NS
from kvledger.adapters.vllm.configuration import ConnectorSettings
from kvledger.adapters.vllm.metric_names import (
    BY_EXTENSION,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    INFO,
    INFO_SETTINGS,
    LABELS,
    LAST_WRITTEN,
    PREFIX,
    REASONS_OF,
)
from kvledger.lifecycle import __version__

_NS: Final = 1_000_000_000


@attrs.frozen
class _Series:
    """The metrics of one engine: name of a figure → metric."""

    counters: dict[str, Any]
    gauges: dict[str, Any]
    histograms: dict[str, Any]


class ConnectorPrometheus(KVConnectorPromMetrics):
    """Registers the metrics through vLLM's hook, with vLLM's labels."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        # First, because reading the settings may refuse the configuration.
        settings = _settings(vllm_config)
        extensions = [extension.name for extension in settings.core().extensions]

        def made(kind: type[Any], named: tuple[str, str], labels: list[str], **options: Any) -> Any:
            name, meaning = named
            return metric_types[kind](name=PREFIX + name, documentation=meaning, labelnames=labels, **options)

        counters = {
            name: made(Counter, named, [*labelnames, LABELS[name]] if name in LABELS else labelnames)
            for name, named in COUNTERS.items()
        }
        values_of_labels = {BY_EXTENSION: extensions, **REASONS_OF}
        # As in vLLM: of several processes that serve one engine, the latest value counts.
        gauges = {
            name: made(Gauge, named, labelnames, multiprocess_mode="mostrecent") for name, named in GAUGES.items()
        }
        bounds = [bound / _NS for bound in DURATION_BOUNDS_NS]
        histograms = {name: made(Histogram, named, labelnames, buckets=bounds) for name, named in HISTOGRAMS.items()}
        self._series = {
            engine: _Series(
                {name: metric.labels(*labels) for name, metric in counters.items() if name not in LABELS}
                | {
                    f"{name}/{value}": counters[name].labels(*labels, value)
                    for name, values in values_of_labels.items()
                    for value in values
                },
                {name: metric.labels(*labels) for name, metric in gauges.items()},
                {name: metric.labels(*labels) for name, metric in histograms.items()},
            )
            for engine, labels in per_engine_labelvalues.items()
        }
        about = {"version": __version__} | {name: _shown(getattr(settings, name)) for name in INFO_SETTINGS}
        info = made(Gauge, INFO, [*labelnames, *about], multiprocess_mode="mostrecent")
        for labels in per_engine_labelvalues.values():
            info.labels(*labels, *about.values()).set(1)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record the figures of one engine in one interval. Skip unknown figures."""
        series = self._series[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in series.counters:
                series.counters[name].inc(value)
            elif name in series.gauges:
                series.gauges[name].set(value / _NS if name == LAST_WRITTEN else value)
            elif name in series.histograms:
                _observe(series.histograms[name], value)


def _observe(histogram: Any, durations: Sequence[int]) -> None:
    """Add durations to the histogram.

    `durations` has the counts of all buckets, and then the sums of all buckets in nanoseconds. This function observes
    the mean of each bucket as often as the bucket's count says. The histogram then has the same counts and sums,
    because each mean lies in its bucket.
    """
    middle = len(durations) // 2
    for count, sum_ns in zip(durations[:middle], durations[middle:], strict=True):
        for _ in range(count):
            histogram.observe(sum_ns / count / _NS)


def _settings(vllm_config: VllmConfig) -> ConnectorSettings:
    """Return the connector's settings.

    Raises:
        ConfigurationError: `kv_connector_extra_config` has a wrong key or value.
    """
    transfer = vllm_config.kv_transfer_config
    return ConnectorSettings.from_extra_config({} if transfer is None else transfer.kv_connector_extra_config)


def _shown(value: object) -> str:
    """Return a setting as the value of a label.

    None becomes "auto": the default depends on the machine or the model.
    """
    return "auto" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
