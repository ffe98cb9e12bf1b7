"""`kvledger ls`: the logs of a directory, the newest first, and how each ended."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver
from log_torture import reopened
from processes import run_and_kill
from stored_logs import OPENED_AT, write_log

from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events
from kvledger.storage.events import BacklogEventStore

LATE = e.RequestArrived("late", 100, 7, 3 * 10**9)


@pytest.fixture
def logs(story: Driver, tmp_path: Path) -> Path:
    """A log_dir after five starts of an engine, each of which ended in another way."""
    directory = tmp_path / "logs"
    for number, name in enumerate(("closed", "killed", "damaged", "beheaded", "unreadable")):
        header = {"opened_at_unix_ns": OPENED_AT + number * 60 * 10**9, "model": "facebook/opt-125m"}
        log = write_log(
            directory / name,
            story.observed,
            story.configuration,
            header=header,
            segment_bytes=2000 + 10**6 * (number != 3),
        )
        newest = max(log.glob("*.kvlog"))
        if name == "killed":
            run_and_kill(lambda log=log: reopened(log).append(encode_events([LATE]), 1))
        elif name == "damaged":
            newest.write_bytes(newest.read_bytes()[:-3])
        elif name == "beheaded":
            newest.unlink()
        elif name == "unreadable":
            newest.write_bytes(b"no log at all")
    return directory


def test_logs_are_listed_the_newest_first_with_how_each_ended(run: Any, logs: Path) -> None:
    """Damage is said of its log, and what cannot be read costs the exit code and not the others."""
    result = run("ls", logs)
    assert result.exit_code == 2
    assert "unreadable: no segment has a readable header" in result.err
    heading, *lines = result.out.splitlines()
    ends = [(line.split()[0], line[heading.index("ended") :]) for line in lines]
    assert sorted(ends) == [
        ("beheaded", "end missing, closed"),
        ("closed", "closed"),
        ("damaged", "damaged, end missing, closed"),
        ("killed", "cut off"),
        ("unreadable", "unreadable"),
    ]
    opened = [line[heading.index("opened") :][:19] for line in lines if not line.startswith("unreadable")]
    assert opened == sorted(opened, reverse=True)
    assert all("facebook/opt-125m" in line for line in lines if not line.startswith("unreadable"))


def test_a_listed_log_says_what_is_in_it(run: Any, logs: Path, story: Driver) -> None:
    """Events, requests, bytes, the time of the last event; without folding anything."""
    found = {Path(str(each["path"])).name: each for each in run("ls", logs, "--json").objects("log_listed")}
    closed, killed = found["closed"], found["killed"]
    assert (closed["num_events"], closed["num_requests"]) == (len(story.observed), 2)
    assert closed["num_bytes"] == sum(file.stat().st_size for file in (logs / "closed").glob("*.kvlog"))
    assert (killed["end"], killed["num_events"], killed["num_requests"]) == ("cut_off", len(story.observed) + 1, 3)
    assert killed["ended_at_unix_ns"] == killed["opened_at_unix_ns"] + LATE.time_ns
    assert found["damaged"]["damage"] == ["torn_tail"]
    assert found["beheaded"]["missing"]["kind"] == "missing_segment"


def test_a_log_whose_disk_is_full_is_told_from_one_that_is_written(run: Any, log: Path) -> None:
    """Its writer lives, and what it was told last is not on the disk."""
    store = BacklogEventStore(reopened(log))
    assert run("ls", log).out.endswith("  open\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    num_bytes = next(log.glob("*.kvlog")).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))  # as if the disk were full
    try:
        for number in range(100):
            store.append(encode_events([e.LogNote(f"note {number}", 10**9)]), 1)
        store.flush()
        while_full, (listed,) = run("ls", log), run("ls", log, "--json").objects("log_listed")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        store.close()
    assert while_full.out.endswith("  open, events wait for the disk\n")
    assert "could not be written: [Errno 27] File too large; the writer tries again" in listed["detail"]
    assert run("ls", log).out.endswith("  closed\n")


def test_kvledger_log_is_listed_by_default(run: Any, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvledger ls`, and nothing more; a log alone is a list of one."""
    monkeypatch.setenv("KVLEDGER_LOG", str(logs))
    assert run("ls").out == run("ls", logs).out
    assert len(run("ls", logs / "closed").out.splitlines()) == 2
