"""`kvledger retire`, and what `verify` says of a log whose oldest segments went."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver
from log_torture import reopened
from stored_logs import write_log

from kvledger.adapters.tools.exit_codes import CommandFailed


def test_retired_segments_are_named_and_deleted_ones_are_damage(run: Any, story: Driver, tmp_path: Path) -> None:
    """What was retired, when and why stands in the record; without one, somebody took it."""
    log = write_log(tmp_path / "long", story.observed, story.configuration, segment_bytes=9_500)
    copy = tmp_path / "copy"
    shutil.copytree(log, copy)
    result = run("retire", log, "--max-bytes", "1", "--dry-run")
    assert "would be retired" in result.out
    assert run("retire", log, "--max-bytes", "1").exit_code == 0
    result = run("verify", log)
    assert result.exit_code == 0
    assert re.search(r"events 1–\d+ were retired by size \(\d+ segments?, the last at 20", result.out)
    assert "rules and decisions were checked from event" in result.out
    assert run("retire", log, "--json", "--max-bytes", "1").out == ""
    min(copy.glob("*.kvlog")).unlink()
    result = run("verify", copy)
    assert result.exit_code == 2
    assert "missing_segment" in result.out
    assert "no record says that they were retired" in result.out


def test_retire_makes_the_snapshot_from_which_the_rest_is_read(run: Any, story: Driver, tmp_path: Path) -> None:
    """Without it nothing of what is left could be checked, and the log said that it was sound."""
    log = write_log(tmp_path / "long", story.observed, story.configuration, segment_bytes=9_500)
    num_bytes = sum(path.stat().st_size for path in log.glob("*.kvlog"))
    retired = run("retire", log, "--max-bytes", str(num_bytes // 2), "--json").objects("retirement")
    assert retired
    assert retired[-1]["is_rest_verifiable"]
    result = run("verify", log)
    assert result.exit_code == 0
    assert "from a snapshot" in result.out
    assert "can no longer be verified" not in result.out


def test_a_log_whose_rest_is_not_verifiable_says_so_when_it_is_retired_and_afterwards(
    run: Any, story: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its snapshots cannot be made."""

    def fail(*_arguments: object) -> int:
        raise CommandFailed("other code")

    monkeypatch.setattr("kvledger.adapters.tools.cli.retire.write_snapshots", fail)
    log = write_log(tmp_path / "long", story.observed, story.configuration, segment_bytes=9_500)
    result = run("retire", log, "--max-bytes", "1")
    assert "later events can no longer be verified" in result.out
    assert "the events from there to the next snapshot cannot be verified" in run("verify", log).out


def test_a_dry_run_promises_nothing_of_a_log_that_is_being_written(run: Any, story: Driver, tmp_path: Path) -> None:
    """Neither of the log itself, nor of it among others."""
    log = write_log(tmp_path / "log", story.observed, story.configuration, segment_bytes=9_500)
    store = reopened(log)
    result = run("retire", log, "--max-bytes", "1", "--dry-run")
    assert (result.exit_code, "being written" in result.err) == (2, True)
    assert run("retire", tmp_path, "--max-bytes", "1", "--dry-run", "--json").objects("retirement") == []
    store.close()


def test_retire_refuses_what_makes_no_sense(run: Any, story: Driver, tmp_path: Path) -> None:
    """No limit, a limit that is none, one file, a log that is being written."""
    log = write_log(tmp_path / "log", story.observed, story.configuration)
    for arguments in (["--max-bytes", "2parsecs"], ["--max-age", "30"], []):
        assert run("retire", log, *arguments).exit_code == 64
    assert run("retire", next(log.glob("*.kvlog")), "--max-bytes", "1").exit_code == 64
    store = reopened(log)
    result = run("retire", log, "--max-bytes", "1")
    assert (result.exit_code, "being written by pid" in result.err) == (2, True)
    store.close()


def test_retire_keeps_a_directory_of_logs_to_a_size(run: Any, story: Driver, tmp_path: Path) -> None:
    """Closed logs go, the oldest first, until what is left fits."""
    for name in ("one", "two", "three"):
        write_log(tmp_path / name, story.observed, story.configuration, segment_bytes=9_500)
    size = sum(path.stat().st_size for path in (tmp_path / "three").glob("*.kvlog"))
    retired = run("retire", tmp_path, "--json", "--max-bytes", f"{size + 100}", "--max-age", "365d").objects(
        "retirement"
    )
    assert {each["log"] for each in retired} == {"one", "two"}
    assert {each["reason"] for each in retired} == {"size"}
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["retired.jsonl", "three"]
