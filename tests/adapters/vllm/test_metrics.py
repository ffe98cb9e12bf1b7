"""The figures on their way to `/metrics`: through vLLM's own statistics, with real Prometheus metrics at the end."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
from prometheus_client import REGISTRY
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

from kvledger.adapters.figures import ADDS, DURATION_BOUNDS_NS, MISS_REASONS, RECOMPUTE_REASONS
from kvledger.adapters.lab.simulation.clock import SimulatedClock
from kvledger.adapters.lab.simulation.connectors import KVLEDGER_TRANSFER
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.vllm import KVLedgerConnector
from kvledger.adapters.vllm.metric_names import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    INFO_SETTINGS,
    LABELS,
    LAST_WRITTEN,
    MISSED,
    PREFIX,
    RECOMPUTED,
)
from kvledger.adapters.vllm.metrics import ConnectorPrometheus
from kvledger.adapters.vllm.stats import OF_LEDGER, ConnectorStats
from kvledger.lifecycle import ConfigurationError, Extension, __version__, fold
from kvledger.lifecycle import events as e
from kvledger.storage.events import segments

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


def the_rest(engine: Any) -> dict[str, Any]:
    """What a step that is news would send, also of the log."""
    engine.connector.scheduler_side.journal.figures_changed = True
    stats = take(engine)
    assert stats is not None
    return stats.data


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


def test_what_is_sent_adds_up_to_the_totals(make_engine: Any, tmp_path: Path) -> None:
    """Every counter, over all steps; the last word of every gauge."""
    engine = preempt_and_recover(make_engine, log_dir=str(tmp_path))
    sent = collect(engine)
    engine.run()
    total = sums([*sent, the_rest(engine)])
    figures = attrs.asdict(engine.figures)
    assert {name: value for name, value in figures.items() if value and name not in LABELS} == {
        name: total[name] for name in OF_LEDGER if name in total
    }
    totals = engine.connector.scheduler_side.journal.totals.state
    for name, by_reason in ((MISSED, totals.num_tokens_missed_by), (RECOMPUTED, totals.num_tokens_recomputed_by)):
        by_label = {reason: total.get(f"{name}/{reason}", 0) for reason in RECOMPUTE_REASONS}
        assert {reason: number for reason, number in by_label.items() if number} == by_reason
    assert sum(totals.num_tokens_missed_by.values()) == figures["num_tokens_queried"] - figures["num_tokens_hit"] > 0
    assert sum(totals.num_tokens_recomputed_by.values()) == figures[RECOMPUTED]
    for name in HISTOGRAMS:
        durations = getattr(totals, name)
        assert total[name] == [*durations.counts, *durations.sums_ns]
        assert sum(durations.counts) > 0, name
    assert sum(totals.recovery_times.counts) == figures["num_preemptions"]
    for name in (
        "num_preemptions",
        "num_tokens_loaded",
        "num_tokens_recovered",
        "num_chunks_saved",
        "num_bytes_loaded",
    ):
        assert figures[name] > 0, name
    slots, store = engine.projections.slots, engine.connector.scheduler_side.log.store
    assert {name: total[name] for name in GAUGES} == {
        "num_chunks_cached": len(engine.projections.pool),
        "num_slots_used": slots.num_slots - slots.num_free,
        "num_slots": slots.num_slots,
        "num_jobs_in_flight": 0,
        "num_log_events_waiting": 0,
        "is_disabled": 0,
        LAST_WRITTEN: store.last_written_unix_ns,
    }
    assert total["num_log_bytes_written"] == store.num_bytes_written > 0


def test_the_tools_count_in_the_log_what_the_connector_counts(make_engine: Any, tmp_path: Path) -> None:
    """One class counts in both."""
    engine = preempt_and_recover(make_engine, log_dir=str(tmp_path))
    engine.run()
    side = engine.connector.scheduler_side
    side.shutdown()
    log = open_log(side.log.directory)
    projections = log.core.new_projections(log.configuration)
    totals = log.totals(projections)
    fold(log.core, log.trusted_events(), log.configuration, start=projections)
    assert totals.stored() == side.journal.totals.stored()
    assert totals.figures.num_tokens_recovered > 0


def test_counting_that_fails_is_a_message_and_nothing_else(
    make_engine: Any, told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are served as before, and the message comes once."""

    def fail(*_arguments: object) -> None:
        raise KeyError("a mistake of ours")

    monkeypatch.setitem(ADDS, e.LookupAnswered, fail)
    engine = preempt_and_recover(make_engine)
    engine.run()
    assert engine.num_preemptions > 0
    assert told.text.count("requests and copies are not counted until the engine restarts") == 1
    assert not engine.connector.scheduler_side.journal.is_disabled
    assert the_rest(engine)["num_slots"] > 0


def test_what_only_writes_the_log_is_sent_once_a_second(make_engine: Any, tmp_path: Path) -> None:
    """A step in which everybody decodes and no chunk fills is no news, but that the log is written."""
    clock = SimulatedClock()
    with clock.read_by(KVLedgerConnector):
        engine = preempt_and_recover(make_engine, log_dir=str(tmp_path), num_blocks=40)
        for _ in range(10):
            engine.step()
        while engine.projections.jobs or engine.scheduler.running[0].num_tokens % 8 != 3:
            engine.step()
        take(engine)
        sent = collect(engine)
        engine.step()
        assert sent == []
        assert take(engine) is None
        clock.pass_ms(1000)
        engine.step()
        (written,) = sent
        assert set(written) == {*GAUGES, "num_log_bytes_written"}
        engine.run()
    assert len(sent) > 1


def test_a_log_that_cannot_be_written_is_seen_in_every_step_until_it_can(
    make_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits is sent while it waits, and that it waits no more; the last write stays when it was."""
    engine = preempt_and_recover(make_engine, log_dir=str(tmp_path))
    engine.step()
    written_before = the_rest(engine)[LAST_WRITTEN]
    store, sent = engine.connector.scheduler_side.log.store, collect(engine)

    def refuse(_descriptor: int, _frame: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full_disk:
        full_disk.setattr(segments.os, "write", refuse)
        engine.step()
        sent.append(the_rest(engine))
        for _ in range(4):
            engine.step()
    waiting = [data["num_log_events_waiting"] for data in sent]
    assert len(waiting) >= 5
    assert waiting == sorted(waiting)
    assert waiting[0] > 0
    assert {data[LAST_WRITTEN] for data in sent} == {written_before}
    store.flush()
    sent.clear()
    engine.step()
    assert sent[0]["num_log_events_waiting"] == 0
    assert sent[0][LAST_WRITTEN] > written_before


def test_a_connector_that_serves_nobody_says_so(make_engine: Any) -> None:
    """The figure stays, for whoever looks later."""
    engine = preempt_and_recover(make_engine)
    assert the_rest(engine)["is_disabled"] == 0
    engine.connector.scheduler_side.journal.decline("for the sake of it")
    assert the_rest(engine)["is_disabled"] == 1


def test_a_worker_has_no_figures_of_its_own(make_engine: Any) -> None:
    """They would be counted twice."""
    engine = preempt_and_recover(make_engine)
    engine.run()
    assert engine.worker.get_kv_connector_stats() is None


def test_prometheus_shows_the_totals(make_engine: Any, unregister: None, tmp_path: Path) -> None:
    """Through vLLM's hook, with vLLM's labels: one metric per figure, of two engines apart."""
    assert unregister is None
    engine = preempt_and_recover(make_engine, log_dir=str(tmp_path))
    sent = collect(engine)
    labels = {0: ["tiny", "0"], 1: ["tiny", "1"]}
    prometheus = KVConnectorProm(engine.vllm_config, ["model_name", "engine"], labels)
    assert isinstance(prometheus.prom_metrics, ConnectorPrometheus)
    engine.run()
    for data in [*sent, the_rest(engine)]:
        prometheus.observe(data, 1)
    figures, state = attrs.asdict(engine.figures), engine.connector.scheduler_side.journal.totals.state
    for name in set(COUNTERS) & set(figures) - set(LABELS):
        assert shown(COUNTERS[name][0] + "_total", "1") == figures[name], name
        assert shown(COUNTERS[name][0] + "_total", "0") == 0, name
    for metric, reasons, by_reason in (
        ("missed_tokens_total", MISS_REASONS, state.num_tokens_missed_by),
        ("recomputed_tokens_total", RECOMPUTE_REASONS, state.num_tokens_recomputed_by),
    ):
        assert {reason: shown(metric, "1", reason=reason) for reason in reasons} == {
            reason: by_reason.get(reason, 0) for reason in reasons
        }
    for name, (metric, _) in HISTOGRAMS.items():
        durations = getattr(state, name)
        assert shown(metric + "_count", "1") == sum(durations.counts) > 0
        assert shown(metric + "_sum", "1") == pytest.approx(sum(durations.sums_ns) / 1e9)
        num_below = 0
        for bound_ns, count in zip(DURATION_BOUNDS_NS, durations.counts, strict=False):
            num_below += count
            assert shown(metric + "_bucket", "1", le=str(bound_ns / 1e9)) == num_below
    slots = engine.projections.slots
    assert shown("used_slots", "1") == slots.num_slots - slots.num_free
    written_ns = engine.connector.scheduler_side.log.store.last_written_unix_ns
    assert shown("log_last_write_timestamp_seconds", "1") == written_ns / 1_000_000_000


def shown(name: str, engine: str, **labels: str) -> float | None:
    """The value of a series; None where there is none."""
    return REGISTRY.get_sample_value(PREFIX + name, {"model_name": "tiny", "engine": engine, **labels})


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
    values = {sample.labels["extension"]: sample.value for sample in metric.samples if sample.name.endswith("_total")}
    assert values == {"quiet": 1, "loud": 3}
    assert {violation.rule for violation in engine.logged(e.InvariantViolated)} == {"LEGAL_TRANSITION"}


def test_extensions_that_cannot_be_made_where_figures_are_shown_are_refused_there(
    make_engine: Any, unregister: None
) -> None:
    """As a child of others, too: events that nobody counts would go unnoticed."""
    assert unregister is None
    engine = make_engine(num_blocks=20, chunk_size=16)
    ours = {**KVLEDGER_TRANSFER, "kv_connector_extra_config": {"extensions": ["no_such_module:Class"]}}
    several = {"connectors": [{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}, ours]}
    for transfer in (ours, {"kv_connector": "MultiConnector", "kv_connector_extra_config": several}):
        engine.vllm_config.kv_transfer_config = KVTransferConfig(**{**transfer, "kv_role": "kv_both"})
        with pytest.raises(ConfigurationError, match="'no_such_module:Class': cannot be imported"):
            KVConnectorProm(engine.vllm_config, ["model_name", "engine"], {0: ["tiny", "0"]})


def test_every_figure_has_a_metric_and_every_metric_is_there_at_once(make_engine: Any, unregister: None) -> None:
    """With every label that vLLM gives, at 0; but for the offers of polls, which reasons are balanced with."""
    assert unregister is None
    engine = make_engine(num_blocks=20, chunk_size=16, extensions=[f"{__name__}:Quiet"])
    stats = take(engine)
    assert stats is not None
    of_durations = {"save_duration_ns", "load_duration_ns"}  # the sums of histograms
    sent = {name.partition("/")[0] for name in (*OF_LEDGER, *stats.data)}
    assert sent - {*COUNTERS, *GAUGES, *HISTOGRAMS} == {"num_tokens_offered", *of_durations}
    KVConnectorProm(engine.vllm_config, ["model_name", "engine"], {0: ["tiny", "0"], 7: ["tiny", "7"]})
    ours = [metric for metric in REGISTRY.collect() if metric.name.startswith(PREFIX)]
    assert len(ours) == len({*COUNTERS, *GAUGES, *HISTOGRAMS}) + 1
    for metric in ours:
        if metric.name == PREFIX + "info":
            continue
        values = {sample.labels["engine"]: sample.value for sample in metric.samples if "_created" not in sample.name}
        assert values == {"0": 0, "7": 0}, metric.name


def test_a_series_names_the_version_and_the_settings(make_engine: Any, unregister: None) -> None:
    """With the value 1, for each engine, so that other series can be joined with it."""
    assert unregister is None
    engine = make_engine(num_blocks=20, chunk_size=16, offer="always", save_interval_tokens=None)
    KVConnectorProm(engine.vllm_config, ["model_name", "engine"], {0: ["tiny", "0"], 7: ["tiny", "7"]})
    (metric,) = (metric for metric in REGISTRY.collect() if metric.name == PREFIX + "info")
    assert [(sample.labels["engine"], sample.value) for sample in metric.samples] == [("0", 1), ("7", 1)]
    labels = metric.samples[0].labels
    assert set(labels) == {"model_name", "engine", "version", *INFO_SETTINGS}
    assert labels["version"] == __version__
    assert (labels["chunk_size"], labels["offer"], labels["save_tails"]) == ("16", "always", "true")
    assert labels["save_interval_tokens"] == "auto"


def test_an_unknown_figure_is_passed_over(make_engine: Any, unregister: None) -> None:
    """A newer scheduler may send more than an older front end knows."""
    assert unregister is None
    engine = make_engine(num_blocks=20, chunk_size=16)
    prometheus = KVConnectorProm(engine.vllm_config, ["model_name", "engine"], {0: ["tiny", "0"]})
    prometheus.observe({"num_of_the_future": 3, "num_requests": 2})
    assert shown("requests_total", "0") == 2


def test_stats_add_counters_and_replace_gauges() -> None:
    """As vLLM aggregates them; the periodic line shows what is not zero."""
    stats = ConnectorStats({"num_requests": 2, "num_slots_used": 9})
    stats.aggregate(ConnectorStats({"num_requests": 3, "num_lookups": 1, "num_slots_used": 0}))
    assert stats.data == {"num_requests": 5, "num_lookups": 1, "num_slots_used": 0}
    assert stats.reduce() == {"num_requests": 5, "num_lookups": 1}
    for _ in range(2):
        stats.aggregate(ConnectorStats({"load_times": [1, 3, 1_000_000, 7_000_000], LAST_WRITTEN: 9}))
    assert stats.data["load_times"] == [2, 6, 2_000_000, 14_000_000]
    assert stats.reduce() == {"num_requests": 5, "num_lookups": 1, "mean_load_time_ms": 2.0}
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
