"""The figures on their way to `/metrics`: through vLLM's own statistics, with real Prometheus metrics at the end."""

from __future__ import annotations

from typing import Any

import attrs
import msgspec
import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

from kvledger.adapters.vllm import KVLedgerConnector
from kvledger.adapters.vllm.metrics import COUNTERS, GAUGES, ConnectorPrometheus, ConnectorStats
from kvledger.lifecycle import Extension
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler


class Quiet(Extension):
    """Says one thing."""

    name = "quiet"


class Loud(Extension):
    """Says many."""

    name = "loud"


@pytest.fixture
def unregister() -> Any:
    """Take the metrics of a test out of the process's registry again."""
    before = set(REGISTRY._collector_to_names)
    yield
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def preempt_and_recover(make_engine: Any, **options: Any) -> Any:
    """A run in which most figures move: saves, preemptions, loads."""
    engine = make_engine(
        **({"num_blocks": 14, "chunk_size": 8, "enable_prefix_caching": False, "host_bytes": 1 << 14} | options)
    )
    for number in range(3):
        engine.add(str(number), range(100 * number, 100 * number + 40), 50)
    return engine


def take(engine: Any) -> ConnectorStats | None:
    """What the scheduler would take after a step."""
    stats = engine.connector.get_kv_connector_stats()
    assert stats is None or isinstance(stats, ConnectorStats)
    return stats


def collect(engine: Any) -> list[dict[str, Any]]:
    """The statistics that vLLM's scheduler sends out, step by step, as they arrive at the other side."""
    sent: list[dict[str, Any]] = []
    make = engine.scheduler.make_stats

    def watch(*arguments: Any, **options: Any) -> Any:
        stats = make(*arguments, **options)
        if stats is not None and stats.kv_connector_stats:
            sent.append(msgspec.msgpack.decode(msgspec.msgpack.encode(stats.kv_connector_stats)))
        return stats

    engine.scheduler.make_stats = watch
    return sent


def sums(sent: list[dict[str, Any]]) -> dict[str, Any]:
    """All intervals together, aggregated by the connector's own class."""
    total = ConnectorStats({})
    for data in sent:
        rebuilt = KVLedgerConnector.build_kv_connector_stats(data)
        assert rebuilt is not None
        total.aggregate(rebuilt)
    return total.data


def test_what_is_sent_adds_up_to_the_totals(make_engine: Any) -> None:
    """Every counter, over all steps; the last word of every gauge."""
    engine = preempt_and_recover(make_engine)
    sent = collect(engine)
    engine.run()
    rest = take(engine)
    if rest is not None:
        sent.append(rest.data)
    total = sums(sent)
    figures = attrs.asdict(engine.figures)
    assert {name: value for name, value in figures.items() if value} == {
        name: value for name, value in total.items() if name not in GAUGES
    }
    for name in (
        "num_preemptions",
        "num_tokens_loaded",
        "num_tokens_recovered",
        "num_chunks_saved",
        "num_bytes_loaded",
    ):
        assert figures[name] > 0, name
    slots = engine.projections.chunks.slots
    assert {name: total[name] for name in GAUGES} == {
        "num_chunks_cached": len(engine.projections.chunks),
        "num_slots_used": slots.num_slots - slots.num_free,
        "num_slots": slots.num_slots,
        "num_jobs_in_flight": 0,
        "num_events_lost": 0,
    }


def test_nothing_is_sent_when_nothing_changed(make_engine: Any) -> None:
    """A step in which everybody decodes and no chunk fills is no news."""
    engine = preempt_and_recover(make_engine, num_blocks=40)
    for _ in range(10):
        engine.step()
    while engine.projections.transfers or engine.scheduler.running[0].num_tokens % 8 != 3:
        engine.step()
    take(engine)
    sent = collect(engine)
    engine.step()
    engine.step()
    assert sent == []
    assert take(engine) is None
    engine.run()
    assert sent


def test_a_worker_has_no_figures_of_its_own(make_engine: Any) -> None:
    """They would be counted twice."""
    engine = preempt_and_recover(make_engine)
    engine.run()
    assert engine.worker.get_kv_connector_stats() is None


def test_prometheus_shows_the_totals(make_engine: Any, unregister: None) -> None:
    """Through vLLM's hook, with vLLM's labels: one metric per figure, of two engines apart."""
    assert unregister is None
    engine = preempt_and_recover(make_engine)
    sent = collect(engine)
    labels = {0: ["tiny", "0"], 1: ["tiny", "1"]}
    prometheus = KVConnectorProm(engine.vllm_config, ["model_name", "engine"], labels)
    assert isinstance(prometheus.prom_metrics, ConnectorPrometheus)
    engine.run()
    rest = take(engine)
    for data in [*sent, *([] if rest is None else [rest.data])]:
        prometheus.observe(data, 1)
    for name, value in attrs.asdict(engine.figures).items():
        metric = f"vllm:kvledger_{name.removeprefix('num_')}_total"
        found = REGISTRY.get_sample_value(metric, {"model_name": "tiny", "engine": "1"})
        assert (found or 0) == value, name
        assert not REGISTRY.get_sample_value(metric, {"model_name": "tiny", "engine": "0"})
    used = REGISTRY.get_sample_value("vllm:kvledger_slots_used", {"model_name": "tiny", "engine": "1"})
    assert used == engine.projections.chunks.slots.num_slots - engine.projections.chunks.slots.num_free


def test_each_extension_has_a_label_of_its_own(make_engine: Any, unregister: None) -> None:
    """Of those that are loaded; events under another name add no label."""
    assert unregister is None
    engine = make_engine(num_blocks=20, chunk_size=16, extensions=[f"{__name__}:Quiet", f"{__name__}:Loud"])
    take(engine)
    for extension, number in (("quiet", 1), ("loud", 3), ("unheard_of", 5)):
        for _ in range(number):
            engine.connector.scheduler_side.journal.observe(e.ExtensionObserved("", extension, "said", 1, b"", 7))
    stats = take(engine)
    assert stats is not None
    prometheus = KVConnectorProm(engine.vllm_config, ["model_name", "engine"], {0: ["tiny", "0"]})
    prometheus.observe(stats.data)
    (metric,) = (metric for metric in REGISTRY.collect() if metric.name == "vllm:kvledger_extension_events")
    shown = {sample.labels["extension"]: sample.value for sample in metric.samples if sample.name.endswith("_total")}
    assert shown == {"quiet": 1, "loud": 3}
    assert {violation.rule for violation in engine.logged(e.InvariantViolated)} == {"LEGAL_TRANSITION"}


def test_every_figure_has_a_metric_and_every_metric_a_sentence(make_engine: Any, unregister: None) -> None:
    """Names are unique; no counter is a gauge."""
    assert unregister is None
    engine = make_engine(num_blocks=20, chunk_size=16)
    made: list[tuple[type, str, str]] = []

    def kind(real: Any) -> Any:
        def make(name: str, documentation: str, labelnames: list[str]) -> Any:
            made.append((real, name, documentation))
            return real(name, documentation, labelnames)

        return make

    types: Any = {real: kind(real) for real in (Counter, Gauge, Histogram)}
    KVLedgerConnector.build_prom_metrics(engine.vllm_config, types, ["model_name", "engine"], {0: ["tiny", "0"]})
    assert len(made) == len(COUNTERS) + len(GAUGES) == len({name for _, name, _ in made})
    assert all(documentation.endswith(".") and documentation[0].isupper() for _, _, documentation in made)
    assert {name for real, name, _ in made if real is Gauge} == {
        f"vllm:kvledger_{name.removeprefix('num_')}" for name in GAUGES
    }


def test_an_unknown_figure_is_passed_over(make_engine: Any, unregister: None) -> None:
    """A newer scheduler may send more than an older front end knows."""
    assert unregister is None
    engine = make_engine(num_blocks=20, chunk_size=16)
    prometheus = KVConnectorProm(engine.vllm_config, ["model_name", "engine"], {0: ["tiny", "0"]})
    prometheus.observe({"num_of_the_future": 3, "num_requests": 2})
    assert REGISTRY.get_sample_value("vllm:kvledger_requests_total", {"model_name": "tiny", "engine": "0"}) == 2


def test_stats_add_counters_and_replace_gauges() -> None:
    """As vLLM aggregates them; the periodic line shows what is not zero."""
    stats = ConnectorStats({"num_requests": 2, "num_slots_used": 9})
    stats.aggregate(ConnectorStats({"num_requests": 3, "num_lookups": 1, "num_slots_used": 0}))
    assert stats.data == {"num_requests": 5, "num_lookups": 1, "num_slots_used": 0}
    assert stats.reduce() == {"num_requests": 5, "num_lookups": 1}
    stats.reset()
    assert stats.is_empty()


def test_the_periodic_line_can_be_logged(make_engine: Any) -> None:
    """VLLM's own logger takes the statistics as they come."""
    engine = preempt_and_recover(make_engine)
    sent = collect(engine)
    logging = KVConnectorLogging(engine.vllm_config.kv_transfer_config)
    engine.run()
    lines: list[str] = []
    for data in sent:
        logging.observe(data)
    logging.log(lambda message, *arguments: lines.append(message % arguments if arguments else message))
    assert any("num_tokens_recovered" in line for line in lines)
