"""How a log ended, as every command tells it: closed, cut off, open, not known, or with its end missing."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver
from log_torture import reopened
from processes import run_and_kill
from stored_logs import write_log

from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events
from kvledger.storage.events import BacklogEventStore

LATE = e.RequestArrived("late", 100, 7, 10**9)


@pytest.fixture
def cut_off(log: Path) -> Path:
    """The story's log, gone on with by a process that was killed: two requests are open."""

    def go_on() -> None:
        reopened(log).append(encode_events([LATE]), 1)

    run_and_kill(go_on)
    return log


@pytest.fixture
def beheaded(story: Driver, tmp_path: Path) -> Path:
    """A log of many segments, of which somebody deleted the newest."""
    log: Path = write_log(tmp_path / "beheaded", story.observed, story.configuration, segment_bytes=2_000)
    max(log.glob("*.kvlog")).unlink()
    assert len(list(log.glob("*.kvlog"))) > 1
    return log


def test_a_closed_log_says_so_everywhere(run: Any, log: Path) -> None:
    """In `verify`, `show`, `stats` and the page, for people and for programs."""
    for command in ("verify", "show", "stats"):
        assert "end         closed; 1 request was open\n" in run(command, log).out
        (end,) = run(command, log, "--json").objects("end")
        assert end == {
            "type": "end",
            "path": str(log),
            "end": "closed",
            "detail": "",
            "missing": None,
            "num_open_requests": 1,
            "under_way": None,
        }
    (verdict,) = run("verify", log, "--json").objects("verdict")
    assert (verdict["verdict"], verdict["end"]) == ("sound", "closed")
    assert "<dt>end</dt><dd>closed; 1 request was open</dd>" in run("export", log, "--html").out


def test_a_log_that_was_cut_off_is_sound_up_to_there(run: Any, cut_off: Path) -> None:
    """Every commit of a killed process was written, so nothing is known to be missing: exit code 0, and plain words."""
    result = run("verify", cut_off)
    assert result.exit_code == 0
    assert "end         cut off: the process ended without closing the log; 2 requests were open\n" in result.out
    assert result.out.endswith("verdict     sound up to where it was cut off\n")
    for command in ("verify", "show", "stats"):
        (end,) = run(command, cut_off, "--json").objects("end")
        assert (end["end"], end["missing"], end["num_open_requests"]) == ("cut_off", None, 2)
    followed = run("show", cut_off, "--follow")
    assert followed.exit_code == 0
    assert followed.out.splitlines()[-1].startswith("end         cut off: the process ended")
    page = run("export", cut_off, "--html").out
    assert "sound up to where it was cut off: every rule that a log can decide is kept" in page
    assert "<dd>cut off: the process ended without closing the log; 2 requests were open</dd>" in page


def test_a_log_that_is_being_written_is_sound_so_far(run: Any, log: Path) -> None:
    """Whoever holds the writer's lock may still write."""
    store = reopened(log)
    result = run("verify", log)
    store.close()
    assert result.exit_code == 0
    assert "end         open: a process is writing the log; 1 request was open" in result.out
    assert result.out.endswith("verdict     sound so far\n")


@pytest.mark.parametrize("part", [["--until", "10"], []])
def test_of_a_part_of_a_log_the_end_is_not_known(run: Any, log: Path, part: list[str]) -> None:
    """One that ends before the log does, or one segment file alone."""
    path = log if part else next(log.glob("*.kvlog"))
    result = run("verify", path, *part)
    assert result.exit_code == 0
    assert "end         not known (" in result.out
    only = "; only events 1–10 were checked" if part else ""
    assert result.out.endswith(f"verdict     sound as far as it was read{only}\n")


def test_a_newest_segment_that_is_gone_gives_4_and_is_named(run: Any, beheaded: Path) -> None:
    """What is there is sound, and the log's record speaks of a segment that is not there."""
    result = run("verify", beheaded)
    assert result.exit_code == 4
    assert "end         missing: missing_segment 000000000000000000" in result.out
    assert result.out.endswith("verdict     sound, but its end is missing\n")
    objects = run("verify", beheaded, "--json").objects()
    (end,) = [item for item in objects if item["type"] == "end"]
    (verdict,) = [item for item in objects if item["type"] == "verdict"]
    missing = end["missing"]
    assert (verdict["verdict"], verdict["exit_code"], verdict["num_damage"]) == ("end_missing", 4, 0)
    assert missing["kind"] == "missing_segment"
    assert missing["first_sequence"] == verdict["num_events"] + 1
    assert missing["num_events"] > 0
    for command in ("show", "stats"):
        (of_command,) = run(command, beheaded, "--json").objects("end")
        assert of_command["missing"] == missing
    page = run("export", beheaded, "--html").out
    assert '<span class="verdict warn">sound, but its end is missing</span>' in page
    assert "missing: missing_segment" in page


def test_a_missing_end_is_less_grave_than_what_is_wrong_with_the_rest(run: Any, beheaded: Path) -> None:
    """Damage and broken rules keep their codes; of several logs the gravest counts."""
    first = min(beheaded.glob("*.kvlog"))
    data = bytearray(first.read_bytes())
    data[-20] ^= 1
    first.write_bytes(data)
    result = run("verify", beheaded)
    assert result.exit_code == 2
    assert "missing: missing_segment" in result.out


def test_events_that_could_not_be_written_give_4_also_after_sigkill(run: Any, log: Path) -> None:
    """They waited in memory for a disk that stayed full; how many, from which one on, and why, is reported."""

    def fill_up() -> None:
        store = BacklogEventStore(reopened(log))
        first = store.next_sequence
        (log / "first").write_text(str(first))
        num_bytes = next(log.glob("*.kvlog")).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))  # as if the disk were full
        for number in range(100):
            store.append(encode_events([e.LogNote(f"note {number}", 10**9)]), 1)
        store.flush()

    run_and_kill(fill_up)
    first = int((log / "first").read_text())
    result = run("verify", log, "--json")
    assert result.exit_code == 4
    (end,) = result.objects("end")
    assert (end["end"], end["num_open_requests"]) == ("cut_off", 1)
    assert end["missing"]["kind"] == "unwritten_events"
    assert (end["missing"]["first_sequence"], end["missing"]["num_events"]) == (first, 100)
    text = run("verify", log).out
    assert f"at least sequences {first} to {first + 99} could not be written: [Errno 27] File too large" in text


def test_an_index_of_a_large_log_does_not_hide_how_it_ended(
    run: Any, cut_off: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`show` of a log that is too large to be read each time asks for its end all the same."""
    monkeypatch.setattr("kvledger.adapters.tools.logs.index.INDEX_FROM_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):
        (end,) = run("show", cut_off, "--json").objects("end")
        assert (end["end"], end["missing"], end["num_open_requests"]) == ("cut_off", None, 2)


@pytest.mark.parametrize("traces", [["log.end"], ["retired.jsonl"]])
def test_a_log_without_any_segment_is_missed_where_something_speaks_of_it(
    run: Any, story: Driver, tmp_path: Path, traces: list[str]
) -> None:
    """Its own directory and the one above say so, with exit code 2: nothing of it can be read."""
    log: Path = write_log(tmp_path / "logs" / "a", story.observed, story.configuration, segment_bytes=2_000)
    assert run("retire", log, "--max-bytes", 1).exit_code == 0
    for path in log.iterdir():
        if path.name not in traces:
            path.unlink()
    for path in (log, log.parent):
        result = run("verify", path)
        assert result.exit_code == 2
        assert f"holds no log segment (*.kvlog); segments are missing: {traces[0]} names " in result.err


def test_a_log_that_was_retired_altogether_is_not_missed(run: Any, log: Path) -> None:
    """Also where a crash left its record behind."""
    record = (log / "log.end").read_bytes()
    assert run("retire", log.parent, "--max-bytes", 0).exit_code == 0
    assert not log.exists()
    log.mkdir()
    (log / "log.end").write_bytes(record)
    assert run("verify", log.parent).exit_code == 64
