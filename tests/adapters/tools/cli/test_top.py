"""`kvledger top` on a log that is being written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver, keys_of, play_seed
from log_torture import reopened
from processes import started
from processes.terminal import terminal_output
from stored_logs import write_log

from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.snapshots import write_snapshots
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events
from kvledger.storage.events import SegmentEventStore

COMMAND = [sys.executable, "-m", "kvledger.adapters.tools.cli.main", "top"]


def busy_engine() -> Driver:
    """`a` runs, `b` has been preempted, `c` waits, and `d` has finished."""
    driver = Driver()
    driver.start("a", keys_of("a", 4), 33, (1, 2, 3))
    driver.start("b", keys_of("b", 4), 33, (4, 5, 6))
    driver.start("d", keys_of("d", 2), 17, (7, 8))
    driver.finish("d", 17, 18)
    driver.preempt("b", 32)
    driver.step(("a", 33, 1, 34))
    driver.arrive("c", 65, keys_of("c", 8))
    driver.ledger.commit()
    return driver


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[Path, SegmentEventStore]]:
    """The directory with its log, which is open and was opened now."""
    driver = busy_engine()
    header = {"num_device_blocks": 60, "opened_at_unix_ns": time.time_ns()}
    log = write_log(tmp_path / "logs" / "1", driver.observed, driver.configuration, header=header)
    store = reopened(log, segment_bytes=1 << 20)
    yield log.parent, store
    store.close()


def test_it_counts_requests_by_state_and_names_those_that_have_waited_longest(
    run: Any, engine: tuple[Path, SegmentEventStore]
) -> None:
    """Once, because stdout is no terminal."""
    directory, _ = engine
    shown = run("top", directory)
    assert shown.exit_code == 0
    lines = {line[:10].strip(): line[10:] for line in shown.out.splitlines()}
    assert lines["requests"] == "1 running, 1 waiting, 1 preempted; 1 finished since event 1"
    assert lines["blocks"] == "3 of 60 held by requests"
    assert re.fullmatch(r"open, event \d+, [\d.]+ \w+ ago", lines["log"])
    assert lines["faults"] == "none recorded"
    (overview,) = run("top", directory, "--once", "--json").objects("overview")
    assert [each["request_id"] for each in overview["worst"]] == ["b", "a", "c"]
    assert overview["worst"][0]["state"] == "preempted"
    assert (overview["num_running"], overview["num_waiting"], overview["num_preempted"]) == (1, 1, 1)
    (overview,) = run("top", directory, "--once", "--json", "--limit", 1).objects("overview")
    assert [each["request_id"] for each in overview["worst"]] == ["b"]


def test_it_goes_on_with_the_next_start_of_the_engine(engine: tuple[Path, SegmentEventStore]) -> None:
    """The log of a start ends, and a newer one lies beside it."""
    directory, store = engine
    arguments = [*COMMAND, "--json", "--interval", "1ms", directory]
    with started(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert (Path(first["path"]).name, first["end"]) == ("1", "open")
        store.append(encode_events([e.RequestArrived("late", 9, 7, 10**9)]), 1)
        while (view := json.loads(process.stdout.readline()))["num_waiting"] == 1:
            pass
        assert view["num_waiting"] == 2
        driver = play_seed(1, 20, chunk_size=16, block_size=16)
        write_log(directory / "2", driver.observed, driver.configuration, header={"opened_at_unix_ns": time.time_ns()})
        store.close()
        views = [json.loads(line) for line in process.stdout]
        assert process.wait() == 0
    assert (Path(views[-1]["path"]).name, views[-1]["end"]) == ("2", "closed")
    assert {view["end"] for view in views if Path(view["path"]).name == "1"} <= {"open", "closed"}


def test_it_begins_at_the_newest_snapshot(run: Any, tmp_path: Path) -> None:
    """A log of gigabytes is not read from its beginning, and what is shown of the engine is the same."""
    driver = play_seed(3, 120, chunk_size=16, block_size=16)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration, segment_bytes=4096)
    (whole,) = run("top", log, "--once", "--json").objects("overview")
    assert write_snapshots(open_log(log, Core.standard())) > 1
    (resumed,) = run("top", log, "--once", "--json").objects("overview")
    of_reading = {"num_finished", "last_fault", "num_recently_queried", "num_recently_hit", "recent_ns"}
    assert {name: value for name, value in resumed.items() if name not in of_reading} == {
        name: value for name, value in whole.items() if name not in of_reading
    }
    assert resumed["num_finished"] < whole["num_finished"]


def test_one_view_counts_the_admissions_of_the_last_minute(run: Any, tmp_path: Path) -> None:
    """Incident: only admissions that this process had watched counted as recent, so one view said "no admission"."""
    driver = Driver()
    driver.start("early", keys_of("early", 2), 33, (1, 2, 3))
    driver.pass_ns(100 * 1_000_000_000)
    driver.start("late", keys_of("late", 4), 65, (4, 5, 6, 7, 8))
    driver.pass_ns(10 * 1_000_000_000)
    driver.arrive("last", 65, keys_of("last", 8))
    driver.ledger.commit()
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    (overview,) = run("top", log, "--once", "--json").objects("overview")
    assert (overview["num_tokens_queried"], overview["num_recently_queried"]) == (33 + 65, 65)
    assert overview["recent_ns"] == 60 * 1_000_000_000
    (line,) = (line for line in run("top", log).out.splitlines() if line.startswith("hit rate"))
    assert line.endswith("last 60 s: 0% (0 of 65 tokens); since the start: 0% (0 of 98 tokens)")


def test_a_terminal_is_given_back_with_the_last_view_on_it(tmp_path: Path) -> None:
    """The whole screen is used until the log has ended."""
    driver = busy_engine()
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    shown = terminal_output([*map(str, COMMAND), str(log)], columns=80).decode()
    screen, _, after = shown.partition("\x1b[?1049l")
    assert "\x1b[?1049h" in screen
    assert "1 running, 1 waiting, 1 preempted" in after


@pytest.mark.parametrize("command", ["ls", "top"])
def test_a_stream_is_refused_as_one(run: Any, command: str) -> None:
    """Incident: "nats:/host does not exist"."""
    refused = run(command, "nats://127.0.0.1:1/STREAM")
    assert refused.exit_code == 64
    assert "reads files only; `kvledger ship --list URL`" in refused.err


def test_faults_are_shown_with_the_last_one(run: Any, tmp_path: Path) -> None:
    """In words, with its event."""
    driver = play_seed(1, 400, chunk_size=16, block_size=16)
    broken = [each for each in driver.observed if isinstance(each, e.InvariantViolated)]
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    (line,) = (line for line in run("top", log).out.splitlines() if line.startswith("faults"))
    assert f"{len(broken)} broken rule" in line
    assert broken[-1].rule in line.partition("the last: ")[2]
