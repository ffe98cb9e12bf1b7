"""The queries of docs/export.md: DuckDB and Polars give the same answers as `kvledger stats` and `open_log`."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest
from lifecycle_driver import play_seed
from stored_logs import write_log

import kvledger
from kvledger.adapters.tools.cli.main import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "export.md"
Rows = list[tuple[Any, ...]]
QUESTIONS = {
    title: (sql, polars)
    for title, sql, polars in re.findall(
        r"^#### ([^\n]+)\n.*?```sql\n(.*?)```\n\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two engine starts with preemptions, evictions and failed copies; the tables of both are beside them."""
    folder = tmp_path_factory.mktemp("on_call")
    for seed in (3, 7):
        driver = play_seed(seed, 300, chunk_size=16, block_size=16, is_watched=False)
        write_log(folder / "logs" / str(seed), driver.observed, driver.configuration)
    assert main(["tables", str(folder / "logs"), "-o", str(folder / "tables")]) == 0
    return folder / "logs"


def answers(title: str, logs: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Rows, Rows]:
    """The rows of both queries of a question."""
    monkeypatch.chdir(logs.parent / "tables")
    sql, polars = QUESTIONS[title]
    frame = eval(polars, {"pl": pl})  # noqa: S307 -- it is what the page shows
    return duckdb.sql(sql).fetchall(), frame.rows()


def slowest(log: kvledger.Log) -> Rows:
    """The ten slowest lives."""
    lives = [(request, life) for request in log.requests() for life in request.lives if life.finished_ns is not None]
    lives.sort(
        key=lambda each: (each[1].arrived_ns - (each[1].finished_ns or 0), each[0].start, each[1].first_sequence)
    )
    return [
        (request.start, request.request_id, ((life.finished_ns or 0) - life.arrived_ns) / 1e9, life.num_preemptions)
        for request, life in lives[:10]
    ]


def reasons_of_stats(logs: Path, capsys: pytest.CaptureFixture[str]) -> Counter[tuple[str, str]]:
    """(kind, reason) → tokens of all logs."""
    capsys.readouterr()
    main(["stats", str(logs), "--json"])
    printed = map(json.loads, capsys.readouterr().out.splitlines())
    tokens: Counter[tuple[str, str]] = Counter()
    for record in printed:
        if record["type"] == "total" and record["path"] is not None:
            for kind in ("missed", "recomputed", "computed_twice"):
                tokens.update({(kind, reason): count for reason, count in record[kind].items()})
    return tokens


def test_the_page_has_five_questions() -> None:
    """Each with a query for DuckDB and one for Polars."""
    assert len(QUESTIONS) == 5


@pytest.mark.parametrize("title", QUESTIONS)
def test_duckdb_and_polars_agree(title: str, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row."""
    of_duckdb, of_polars = answers(title, logs, monkeypatch)
    assert of_duckdb
    for one, other in zip(of_duckdb, of_polars, strict=True):
        for value, same in zip(one, other, strict=True):
            assert math.isclose(value, same) if isinstance(value, float) else value == same


def test_the_slowest_requests_are_those_of_the_log(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From arrival to end."""
    found, _ = answers("Which requests were slowest?", logs, monkeypatch)
    assert [row[:4] for row in found] == slowest(kvledger.open_log(logs))


def test_the_hit_rate_counts_the_lookups_of_the_log(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Incident: a request that waited counted once for each number of tokens that vLLM still had cached."""
    found, _ = answers("How did the hit rate change?", logs, monkeypatch)
    last = {
        (each.start, each.request_id, each.ordinal, each.generation): each
        for each in kvledger.open_log(logs).lookups()
        if each.num_external_tokens is not None
    }
    counted = last.values()
    assert len(counted) < sum(each.num_external_tokens is not None for each in kvledger.open_log(logs).lookups())
    assert sum(row[1] for row in found) == sum(each.num_external_tokens or 0 for each in counted)
    assert sum(row[2] for row in found) == sum(each.num_tokens - each.num_computed_tokens for each in counted)


def test_tokens_by_reason_are_those_of_stats(
    logs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of both starts together."""
    found, _ = answers("Why were tokens computed?", logs, monkeypatch)
    assert +Counter({(kind, reason): count for kind, reason, count in found}) == +reasons_of_stats(logs, capsys)


def test_evictions_are_those_of_the_log(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times and chunks."""
    found, _ = answers("How many chunks were evicted each hour?", logs, monkeypatch)
    evictions = list(kvledger.open_log(logs).evictions())
    assert sum(row[1] for row in found) == len(evictions)
    assert sum(row[2] for row in found) == sum(len(each.keys) for each in evictions)


def test_the_percentile_of_copies_is_that_of_the_log(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of completed copies of each kind."""
    found, _ = answers("How long do copies take?", logs, monkeypatch)
    latest_ns: dict[tuple[str, int], int] = {}
    """(start, sequence) → time, which does not run backwards as it does in a random walk."""
    for entry in kvledger.open_log(logs).entries():
        before = latest_ns.get((entry.start, entry.sequence - 1), 0)
        latest_ns[entry.start, entry.sequence] = max(before, entry.time_ns)
    times: dict[str, list[int]] = {}
    for copy in kvledger.open_log(logs).copies():
        if copy.outcome == "completed" and copy.settled_sequence is not None:
            begin, end = latest_ns[copy.start, copy.sequence], latest_ns[copy.start, copy.settled_sequence]
            times.setdefault(copy.kind, []).append(end - begin)
    assert [(kind, count) for kind, count, _ in found] == sorted((kind, len(its)) for kind, its in times.items())
    for kind, _, p99_ms in found:
        durations = sorted(times[kind])
        place = 0.99 * (len(durations) - 1)
        low, high = durations[math.floor(place)], durations[math.ceil(place)]
        assert math.isclose(p99_ms, (low + (high - low) * (place % 1)) / 1e6)
