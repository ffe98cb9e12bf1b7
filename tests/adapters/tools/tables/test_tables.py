"""`kvledger tables`, `Log.to_arrow` and `Log.to_pandas`: typed rows that agree with each other and with `stats`."""

from __future__ import annotations

import datetime as dt
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver, keys_of, play_seed
from pyarrow import parquet
from stored_logs import OPENED_AT, header_of, tell_story, write_log

import kvledger
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.tables import arrow
from kvledger.adapters.tools.tables.arrow import arrow_schema, parquet_file
from kvledger.adapters.tools.tables.rows import read_rows
from kvledger.adapters.tools.tables.schema import TABLES
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events
from kvledger.storage.events import SegmentEventStore

BY_DEFAULT = [name for name in TABLES if name != "violations"]


@pytest.fixture(scope="module")
def story() -> Driver:
    """A request computes, is preempted, comes back by a load and ends; another one is new."""
    return tell_story(clock_rate=1700)


@pytest.fixture
def log(story: Driver, tmp_path: Path) -> Path:
    """The story as a log."""
    return write_log(tmp_path / "log", story.observed, story.configuration)


@pytest.fixture(params=[3, 7, 11])
def random_log(request: Any, tmp_path: Path) -> Path:
    """In it copies fail, ranks stay silent, requests are preempted and caches are reset."""
    driver = play_seed(request.param, 70, chunk_size=16, block_size=16, is_watched=False)
    return write_log(tmp_path / "log", driver.observed, driver.configuration)


def broken_log(folder: Path, num_lookups: int) -> Path:
    """A log with lookups of a request that never arrived."""
    driver = tell_story()
    orphans = [e.LookupRequested("nobody", 0, 16, 10**9 + number) for number in range(num_lookups)]
    return write_log(folder, [*driver.observed, *orphans], driver.configuration)


# --- the command --------------------------------------------------------------------------------


def test_each_table_is_a_file_with_documented_types(run: Any, log: Path, tmp_path: Path) -> None:
    """Files of empty tables, too. `violations` is only written when it is named."""
    folder = tmp_path / "tables"
    assert run("tables", log, "-o", folder).exit_code == 0
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.parquet" for name in BY_DEFAULT)
    for name in BY_DEFAULT:
        assert parquet.read_schema(folder / f"{name}.parquet").equals(arrow_schema(TABLES[name]), check_metadata=True)


def test_a_file_has_the_rows_that_a_program_gets(run: Any, random_log: Path, tmp_path: Path) -> None:
    """All tables are filled in one reading, and each of them alone."""
    names = ",".join(TABLES)
    assert run("tables", random_log, "-o", tmp_path / "tables", "--table", names).exit_code == 0
    for name in TABLES:
        table = kvledger.open_log(random_log).to_arrow(name)
        assert parquet.read_table(tmp_path / "tables" / f"{name}.parquet").equals(table), name


def test_the_same_log_gives_the_same_bytes(run: Any, random_log: Path, tmp_path: Path) -> None:
    """Files can be compared, and written again without harm."""
    for folder in ("first", "second"):
        assert run("tables", random_log, "-o", tmp_path / folder).exit_code == 0
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()


def test_json_lists_what_was_written(run: Any, log: Path, tmp_path: Path) -> None:
    """One object for each table."""
    written = run("tables", log, "-o", tmp_path / "tables", "--table", "steps,requests", "--json").objects("table")
    assert [each["table"] for each in written] == ["steps", "requests"]
    for each in written:
        path = Path(each["path"])
        assert each["num_bytes"] == path.stat().st_size
        assert each["num_rows"] == parquet.read_metadata(path).num_rows
        assert each["num_logs"] == 1


def test_a_file_that_exists_is_only_replaced_with_force(run: Any, log: Path, tmp_path: Path) -> None:
    """Nothing is written next to it either."""
    (tmp_path / "steps.parquet").write_text("mine")
    refused = run("tables", log, "-o", tmp_path, "--table", "requests,steps")
    assert refused.exit_code == 64
    assert "exists already" in refused.err
    assert (tmp_path / "steps.parquet").read_text() == "mine"
    assert not list(tmp_path.glob("*requests*"))
    assert run("tables", log, "-o", tmp_path, "--table", "requests,steps", "--force").exit_code == 0
    assert parquet.read_metadata(tmp_path / "steps.parquet").num_rows > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "tables", "--table", "unicorns"], "there is no table 'unicorns'; choose one of requests,"),
        ([], "this command writes several files; name a folder with -o"),
        (["-o", "a_file"], "a_file is not a folder"),
        (["-o", "no/such"], "No such file or directory; name a folder that can be created"),
    ],
)
def test_wrong_usage_is_explained(run: Any, log: Path, monkeypatch: Any, arguments: list[str], message: str) -> None:
    """With exit code 64."""
    monkeypatch.chdir(log.parent)
    Path("a_file").write_text("")
    result = run("tables", log, *arguments)
    assert result.exit_code == 64
    assert message in result.err


def test_all_engine_starts_are_in_one_file(run: Any, story: Driver, tmp_path: Path) -> None:
    """`start` tells them apart; (`start`, `ordinal`) is a key of `requests`."""
    for name in ("first", "second"):
        write_log(tmp_path / "logs" / name, story.observed, story.configuration)
    assert run("tables", tmp_path / "logs", "-o", tmp_path / "tables").exit_code == 0
    rows = parquet.read_table(tmp_path / "tables" / "requests.parquet").to_pylist()
    assert Counter(row["start"] for row in rows) == {"first": 2, "second": 2}
    assert len({(row["start"], row["ordinal"]) for row in rows}) == 4


def test_a_part_has_the_rows_of_that_part(run: Any, log: Path, tmp_path: Path) -> None:
    """--since, --until and --request."""
    part = ("--since", 10, "--until", 20)
    assert run("tables", log, "-o", tmp_path / "part", *part).exit_code == 0
    for name in ("lookups", "steps"):
        sequences = parquet.read_table(tmp_path / "part" / f"{name}.parquet")["sequence"].to_pylist()
        assert all(10 <= sequence <= 20 for sequence in sequences)
    assert run("tables", log, "-o", tmp_path / "one", "--request", "chat-9").exit_code == 0
    for name in ("requests", "reasons", "lookups"):
        ids = parquet.read_table(tmp_path / "one" / f"{name}.parquet")["request_id"].to_pylist()
        assert set(ids) <= {"chat-9"}


# --- values -------------------------------------------------------------------------------------


def test_a_row_has_the_time_of_day_and_the_time_since_the_log_was_opened(log: Path) -> None:
    """In microseconds (UTC) and in nanoseconds."""
    for row in kvledger.open_log(log).to_arrow("steps").to_pylist():
        since_epoch = (row["time"] - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)
        assert since_epoch == (OPENED_AT + row["time_ns"]) // 1000


def test_without_a_wall_clock_the_time_of_day_is_null(story: Driver, tmp_path: Path) -> None:
    """The time since opening is known."""
    log = write_log(tmp_path / "log", story.observed, story.configuration, header={"opened_at_unix_ns": None})
    rows = kvledger.open_log(log).to_arrow("steps").to_pylist()
    assert {row["time"] for row in rows} == {None}
    assert all(row["time_ns"] for row in rows)


def test_tokens_by_reason_add_up_to_stats(run: Any, random_log: Path) -> None:
    """For each kind and reason."""
    (total,) = run("stats", random_log, "--json").objects("total")
    found: Counter[tuple[str, str]] = Counter()
    for row in kvledger.open_log(random_log).to_arrow("reasons").to_pylist():
        found[row["kind"], row["reason"]] += row["num_tokens"]
    expected = {
        (kind, reason): num_tokens
        for kind in ("missed", "recomputed", "computed_twice")
        for reason, num_tokens in total[kind].items()
    }
    assert +found == {key: num_tokens for key, num_tokens in expected.items() if num_tokens}


def test_times_of_workers_add_up_to_stats(run: Any, tmp_path: Path) -> None:
    """Incident: workers report the saves of a step together, and each save had the whole time."""
    driver = Driver(chunk_size=16)
    for name, first_block in (("a", 1), ("b", 11)):
        driver.start(name, keys_of(name, 2), 33, range(first_block, first_block + 3))
        driver.finish(name, 33, 34)
    first, second = (job.job_id for job in driver.projections.jobs)
    driver.report(first, together=(second,), duration_ns=11)
    driver.ledger.commit()
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    (statistics,) = run("stats", log, "--json").objects("statistics")
    assert statistics["figures"]["save_duration_ns"] == 11
    opened = kvledger.open_log(log)
    shown = [run("show", log, name, "--json").objects("group") for name in ("a", "b")]
    for times in (
        opened.to_arrow("copies")["worker_ns"].to_pylist(),
        [copy.worker_ns for copy in opened.copies()],
        [sum(group["duration_ns"] for group in groups) for groups in shown],
    ):
        assert times == [5, 6]


def test_a_broken_rule_has_a_row_with_its_time_and_how_often_it_is_broken(tmp_path: Path) -> None:
    """The table lists the first 1,000 breaches; the count is that of all."""
    log = broken_log(tmp_path / "log", 1100)
    opened = kvledger.open_log(log)
    (report,) = opened.verify().logs
    rows = opened.to_arrow("violations").to_pylist()
    assert len(report.violations) == 1000
    assert [(row["sequence"], row["rule"], row["detail"]) for row in rows if row["sequence"]] == [
        (each.sequence, each.rule, each.detail) for each in report.violations
    ]
    assert {row["rule"]: row["num_of_rule"] for row in rows} == dict(report.num_violations)
    times = {entry.sequence: entry.time_ns for entry in opened.entries()}
    assert all(row["time_ns"] == times[row["sequence"]] for row in rows if row["sequence"])


def test_pandas_keeps_integers_exact(log: Path) -> None:
    """Columns with nulls, too: floats would lose nanoseconds."""
    frame = kvledger.open_log(log).to_pandas("requests")
    assert len(frame) == 2
    assert str(frame["finished_ns"].dtype) == "Int64"
    assert frame["finished_ns"].isna().sum() == 1
    assert str(frame["time"].dtype) == "datetime64[us, UTC]"


def test_a_table_that_does_not_exist_is_refused_with_the_names(log: Path) -> None:
    """As by the command."""
    with pytest.raises(ValueError, match=r"there is no table 'unicorns'; choose one of requests, lookups, copies"):
        kvledger.open_log(log).to_arrow("unicorns")


def test_a_missing_package_is_named_with_the_remedy(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kvledger brings pyarrow with an extra. pandas is the user's own."""
    opened = kvledger.open_log(log)
    find_spec = arrow.importlib.util.find_spec
    monkeypatch.setattr(arrow.importlib.util, "find_spec", lambda name: None if name == "pandas" else find_spec(name))
    with pytest.raises(ModuleNotFoundError, match=r"Log\.to_pandas needs pandas, .*: pip install pandas"):
        opened.to_pandas("requests")
    monkeypatch.setattr(arrow.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.delitem(sys.modules, "pyarrow")
    with pytest.raises(ModuleNotFoundError, match=r"needs pyarrow, not installed here: pip install 'kvledger\[lake\]'"):
        opened.to_arrow("requests")


# --- reading ------------------------------------------------------------------------------------


def test_rows_are_written_while_the_log_is_read(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups have a fixed size, so memory does not grow with the log."""
    monkeypatch.setattr(arrow, "ROWS_PER_GROUP", 4)
    monkeypatch.setattr(arrow, "_ROWS_PER_BATCH", 2)
    path = tmp_path / "steps.parquet"
    with path.open("wb") as file, parquet_file(file, TABLES["steps"]) as rows:
        read_rows(open_log(log), Selection(), "log", {"steps": rows.add}, print)
    about = parquet.read_metadata(path)
    sizes = [about.row_group(number).num_rows for number in range(about.num_row_groups)]
    assert sizes[:-1] == [4] * (len(sizes) - 1)
    assert len(sizes) > 1
    assert parquet.read_table(path).equals(kvledger.open_log(log).to_arrow("steps"))


@pytest.mark.parametrize("table", ["lookups", "violations"])
def test_a_log_that_is_being_written_is_read_up_to_where_it_ended_at_first(
    story: Driver, tmp_path: Path, table: str
) -> None:
    """A writer that is as fast as the reader would otherwise keep it busy for ever."""
    store = SegmentEventStore.create(tmp_path / "log", header_of(story.configuration))
    store.append(encode_events(story.observed[:20]), 20)
    opened = open_log(tmp_path / "log")
    read = []
    for batch in opened.batches_so_far():
        read.append(batch.last_sequence)
        store.append(encode_events([e.LogNote("more", 10**9)]), 1)
    assert read == [20]
    assert (opened.num_events, opened.last_sequence, opened.ending.how.value) == (20, 20, "open")
    assert kvledger.open_log(tmp_path / "log").to_arrow(table).num_rows >= 0
    store.close()
