"""`show --follow` on a log that is being written."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver, keys_of, play_seed
from log_torture import reopened
from log_torture.stored import compress_closed
from processes import started
from stored_logs import write_log

from kvledger.adapters.tools.cli.feed import Feed, Line
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events
from kvledger.lifecycle.reader import Model, Reader
from kvledger.storage.events import SegmentEventStore

COMMAND = [sys.executable, "-m", "kvledger.adapters.tools.cli.main"]
REQUEST = "chat-17-b6"


@pytest.fixture
def writer(log: Path) -> Iterator[SegmentEventStore]:
    """Somebody who goes on with the story's log."""
    store = reopened(log, segment_bytes=1)
    yield store
    store.close()


@pytest.fixture
def follower(log: Path, writer: SegmentEventStore) -> Iterator[subprocess.Popen[str]]:
    """A process that follows the story's log, which is being written."""
    assert writer.directory == log
    arguments = [*COMMAND, "show", "--follow", "--since", "1", "--json", log]
    with started(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process


def next_line(follower: subprocess.Popen[str]) -> dict[str, Any]:
    """The next object that it prints."""
    assert follower.stdout is not None
    return json.loads(follower.stdout.readline())  # type: ignore[no-any-return]


def test_a_followed_log_is_printed_as_it_grows_and_how_it_ends(
    follower: subprocess.Popen[str], writer: SegmentEventStore
) -> None:
    """Also across a new segment, and when others are compressed; when nobody writes the log any more, it says so."""
    lines = [next_line(follower)]
    while lines[-1]["request_id"] != "chat-9":
        lines.append(next_line(follower))
    assert lines[0]["text"] == "arrived with 45 prompt tokens"
    assert any(line["state_after"] == "preempted" for line in lines)
    for number in range(3):
        event = e.RequestArrived(f"late-{number}", 100 + number, 7, 10**9)
        writer.append(encode_events([event]), 1)
        compress_closed(writer.directory)
        line = next_line(follower)
        assert (line["request_id"], line["text"], line["time_ns"]) == (
            f"late-{number}",
            "arrived with 7 prompt tokens",
            10**9,
        )
    writer.close()
    end = next_line(follower)
    assert (end["type"], end["end"], end["missing"], end["num_open_requests"]) == ("end", "closed", None, 4)
    assert follower.wait() == 0


def test_a_request_alone_can_be_followed_up_to_a_moment(run: Any, log: Path) -> None:
    """The lines that concern it, and an end."""
    result = run("show", "--follow", log, REQUEST, "--since", 1, "--until", 46)
    assert result.exit_code == 0
    day, *lines = result.out.splitlines()
    assert day == "2025-06-15 (UTC)"
    assert all(REQUEST in line for line in lines)
    assert any("running → preempted  preempted with 64 settled tokens" in line for line in lines)


def test_following_begins_with_the_last_lines(run: Any, tmp_path: Path) -> None:
    """Ten of them, or as many as are asked for; from a moment on every line."""
    driver = play_seed(1, 60, chunk_size=16, block_size=16)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    every = run("--json", "show", "--follow", log, "--since", 1).objects("line")
    assert len(every) > 10
    assert run("--json", "show", "--follow", log).objects("line") == every[-10:]
    assert run("--json", "show", "--follow", log, "--tail", 3).objects("line") == every[-3:]
    assert run("--json", "show", "--follow", log, "--tail", 0).objects("line") == []
    assert run("--json", "show", "--follow", log, "--since", 1, "--tail", 3).objects("line") == every[-3:]
    refused = run("show", log, "--tail", 3)
    assert (refused.exit_code, "--tail needs --follow" in refused.err) == (64, True)


def lines_of(driver: Driver) -> list[Line]:
    """What a feed gives of the driver's events."""
    model = Model(Core.standard().tables, driver.configuration)
    feed = Feed(model, Core.standard())
    Reader(model, [feed]).take(enumerate(driver.observed, 1))
    return feed.pop_lines()


def test_polls_with_the_same_answer_are_printed_once(story: Driver) -> None:
    """A waiting request is asked about at every step."""
    lines = lines_of(story)
    lookups = [line for line in lines if line.text.startswith("looked up 65 tokens")]
    assert len(lookups) == 1
    assert not any("computed" in line.text and line.text.startswith("save 1") for line in lines)


def test_polls_whose_answers_differ_in_numbers_are_two_lines() -> None:
    """Incident: a waiting request filled a screen with lookups that differ in what vLLM still had in its cache."""
    driver = Driver()
    driver.arrive("a", 65, keys_of("a", 4))
    for num_computed in (64, 64, 48, 32):
        driver.lookup("a", num_computed, 65)
    driver.allocate("a", (1, 2, 3, 4, 5))
    driver.step(("a", 32, 33, 65))
    driver.finish("a", 65, 66)
    driver.ledger.commit()
    asked = [line.text for line in lines_of(driver) if "looked up" in line.text]
    assert asked[0].startswith("looked up 65 tokens, 64 of them computed already")
    assert asked[1].startswith("looked up 3 more times in ")
    assert "; the last: looked up 65 tokens, 32 of them computed" in asked[1]
    assert len(asked) == 2


def test_a_poll_that_breaks_a_rule_is_never_left_out() -> None:
    """Each of them is a line of its own, though the answers differ only in numbers."""
    model = Model(Core.standard().tables, Driver().configuration)
    feed = Feed(model, Core.standard())
    events: list[e.Event] = [e.RequestArrived("a", 0, 65, 1)]
    for time_ns in (2, 3):
        answer = e.LookupAnswered("a", 0, 0, 0, 65, 0, 0, is_async=False, miss_reason="missing", cause=len(events) + 1)
        broken = e.InvariantViolated("LOOKUP_PURE", "a", 0, 0, f"answered {time_ns}", len(events) + 1)
        events += [e.LookupRequested("a", 0, 65, time_ns), answer, broken]
    Reader(model, [feed]).take([*enumerate(events, 1), (len(events) + 1, e.LogNote("the end", 9))])
    assert [line.num_broken for line in feed.pop_lines() if line.num_broken] == [1, 1]


@pytest.mark.parametrize("seed", range(4))
def test_every_breach_and_every_change_of_state_is_printed(seed: int) -> None:
    """What is left out is only what is quiet."""
    print(f"seed {seed}")
    driver = play_seed(seed, 60, chunk_size=16, block_size=16)
    lines = lines_of(driver)
    broken = sum(isinstance(event, e.InvariantViolated) for event in driver.observed)
    assert sum(line.num_broken for line in lines) == broken
    preempted = sum(isinstance(event, e.RequestPreempted) for event in driver.observed)
    assert sum(line.state_after == "preempted" != line.state_before for line in lines) == preempted
