"""`kvledger export --csv`: tables that a notebook reads as they are."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver.concerned import figures_of
from stored_logs import tell_story, write_log

from kvledger.adapters.tools.export.tables import COLUMNS
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.sources import find_logs
from kvledger.lifecycle import events as e

REQUEST = "chat-17-b6"
UNITS = ("_ms", "num_", "is_", "_tokens")


def rows_of(text: str) -> list[dict[str, str]]:
    """The rows of a table, by the names of their columns."""
    assert text.endswith("\r\n")
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


def table(run: Any, log: Path, name: str, path: Path, *options: object) -> list[dict[str, str]]:
    """Write a table and read it."""
    result = run("export", log, "--csv", name, "-o", path, "--force", *options)
    assert result.exit_code == 0, result.err
    return rows_of(path.read_bytes().decode())


def test_requests_are_the_table_that_is_written_without_a_word(run: Any, log: Path, tmp_path: Path) -> None:
    """One row per life with what became of it, and how long it was in each state."""
    path = tmp_path / "requests.csv"
    assert run("export", log, "--csv", "-o", path).exit_code == 0
    first, second = rows_of(path.read_bytes().decode())
    assert (first["request_id"], first["outcome"], first["num_tokens"]) == (REQUEST, "FINISHED_STOPPED", "66")
    assert (first["num_preemptions"], first["num_tokens_loaded"], first["num_chunks_saved"]) == ("1", "64", "8")
    assert (second["outcome"], second["finished_ms"]) == ("new", "")
    total = sum(float(value) for name, value in first.items() if name.startswith("in_"))
    assert total == pytest.approx(float(first["released_ms"]) - float(first["arrived_ms"]))
    assert first["utc"] == "2025-06-15T15:06:40.001700Z"


def test_times_are_exact_to_the_nanosecond(run: Any, story: Any, tmp_path: Path) -> None:
    """Also where a float would have lost it."""
    late = 10**16 + 123_456_789
    events = [*story.observed, e.LogNote("late", late)]
    log = write_log(tmp_path / "log", events, story.configuration)
    rows = table(run, log, "events", tmp_path / "t.csv")
    assert rows[-1]["time_ms"] == "10000000123.456789"


def test_states_join_without_a_hole(run: Any, log: Path, tmp_path: Path) -> None:
    """A row per stay, which begins where the one before ended."""
    rows = [row for row in table(run, log, "states", tmp_path / "t.csv") if row["request_id"] == REQUEST]
    assert [row["state"] for row in rows] == ["new", "running", "preempted", "recovering", "running", "finished"]
    assert [row["until_ms"] for row in rows[:-1]] == [row["since_ms"] for row in rows[1:]]


def test_transfers_have_bytes_and_times(run: Any, log: Path, tmp_path: Path) -> None:
    """A row per job."""
    rows = table(run, log, "transfers", tmp_path / "t.csv")
    assert [row["kind"] for row in rows] == ["save", "save", "load"]
    assert (rows[-1]["num_bytes"], rows[-1]["num_tokens"], rows[-1]["num_chunks"]) == ("100", "64", "0")
    assert float(rows[-1]["duration_ms"]) > 0


def test_repeated_lookups_are_marked(run: Any, log: Path, tmp_path: Path) -> None:
    """A request that waits is asked about again and again; whoever counts reasons wants it once."""
    rows = table(run, log, "lookups", tmp_path / "t.csv")
    assert [row["is_repeated"] for row in rows] == ["false", "false", "true", "true"]
    assert rows[1]["num_external_tokens"] == "64"


def test_steps_have_what_could_be_counted_then(run: Any, log: Path, tmp_path: Path) -> None:
    """One row per step of the engine."""
    rows = table(run, log, "steps", tmp_path / "t.csv")
    assert [int(row["step"]) for row in rows] == list(range(len(rows)))
    assert rows[0]["num_scheduled_tokens"] == "45"
    assert rows[5]["num_running_requests"] == "1"
    assert rows[5]["num_blocks_held"] == "4"


def test_events_are_all_there_with_their_fields(run: Any, log: Path, tmp_path: Path, story: Any) -> None:
    """For whatever no other table answers; the fields are JSON, keys in hexadecimal."""
    rows = table(run, log, "events", tmp_path / "t.csv")
    assert [row["event"] for row in rows] == [event.id for event in story.observed]
    assert [int(row["sequence"]) for row in rows] == list(range(1, len(rows) + 1))
    saved = next(row for row in rows if row["event"] == "save.issued")
    assert json.loads(saved["fields"])["chunks"] == [0, 1, 2, 3, 4]
    assert rows[int(saved["cause"]) - 1]["event"] == "step.scheduled"


def test_a_part_has_the_rows_of_that_part(run: Any, log: Path, tmp_path: Path) -> None:
    """--since, --until and --request."""
    rows = table(run, log, "events", tmp_path / "t.csv", "--since", 10, "--until", 20)
    assert [int(row["sequence"]) for row in rows] == list(range(10, 21))
    rows = table(run, log, "events", tmp_path / "t.csv", "--request", "chat-9")
    assert {row["request_id"] for row in rows} == {"chat-9"}
    assert len(table(run, log, "requests", tmp_path / "t.csv", "--request", "chat-9")) == 1


def test_quotes_commas_and_line_breaks_stay_inside_their_cell(run: Any, tmp_path: Path) -> None:
    """RFC 4180, whatever a request calls itself."""
    ugly = 'a,"b"\r\nc\u2028;=1+1'
    story = tell_story(ugly)
    log = write_log(tmp_path / "log", story.observed, story.configuration)
    assert table(run, log, "requests", tmp_path / "t.csv")[0]["request_id"] == ugly


def test_all_tables_are_written_into_a_folder(run: Any, log: Path, tmp_path: Path) -> None:
    """One file each, all in one reading of the log."""
    folder = tmp_path / "tables"
    assert run("export", log, "--csv", "all", "-o", folder).exit_code == 0
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.csv" for name in COLUMNS)
    for name in COLUMNS:
        single = table(run, log, name, tmp_path / "t.csv")
        assert rows_of((folder / f"{name}.csv").read_bytes().decode()) == single
        assert (folder / f"{name}.csv").read_text().splitlines()[0].split(",") == list(COLUMNS[name])


def test_every_column_is_documented() -> None:
    """docs/export.md lists each table with its columns, in their order."""
    page = (Path(__file__).resolve().parents[4] / "docs" / "export.md").read_text()
    for name in COLUMNS:
        section = page.split(f"### `{name}`")[1].split("\n#")[0]
        listed = [line.split("|")[1].strip().strip("`") for line in section.splitlines() if line.startswith("| `")]
        assert ["log", *listed, "utc"] == list(COLUMNS[name]), name


def test_logs_of_several_engines_are_told_apart_by_the_first_column(run: Any, story: Any, tmp_path: Path) -> None:
    """One table for all starts of an engine."""
    for name in ("first", "second"):
        write_log(tmp_path / "logs" / name, story.observed, story.configuration)
    rows = table(run, tmp_path / "logs", "requests", tmp_path / "t.csv")
    assert Counter(row["log"] for row in rows) == {"first": 2, "second": 2}


@pytest.mark.scheduler
def test_the_tables_of_worlds_add_up_to_the_figures_of_their_logs(
    run: Any, worlds: dict[int, Path], tmp_path: Path
) -> None:
    """Tokens, chunks, preemptions, lookups and evictions, counted twice."""
    for seed, directory in worlds.items():
        for number, path in enumerate(find_logs(directory)):
            print(f"seed {seed}, log {number}")
            folder = tmp_path / f"{seed}-{number}"
            assert run("export", path, "--csv", "all", "-o", folder).exit_code == 0
            tables = {name: rows_of((folder / f"{name}.csv").read_bytes().decode()) for name in COLUMNS}
            stored = open_log(path)
            figures = figures_of(stored.events(), stored.configuration)
            requests = tables["requests"]
            assert len(requests) == figures.num_requests
            assert sum(int(row["num_preemptions"]) for row in requests) == figures.num_preemptions
            assert sum(int(row["num_tokens_loaded"]) for row in requests) == figures.num_tokens_loaded
            assert sum(not row["deferred_for_job"] for row in tables["lookups"]) == figures.num_lookups
            evictions = [event for _, event in stored.events() if isinstance(event, e.ChunksEvicted)]
            assert sum(row["kind"] == "chunks.evicted" for row in tables["instants"]) == len(evictions)
            assert sum(len(event.keys) for event in evictions) == figures.num_chunks_evicted
            failed = Counter(row["kind"] for row in tables["transfers"] if row["outcome"] in {"failed", "given up"})
            assert failed["load"] == figures.num_loads_failed
            assert failed["save"] + failed["tail save"] == figures.num_saves_failed
