"""A log disk that is full when the engine starts: old segments give way, and without any the log begins later."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from lifecycle_driver import play_seed
from log_torture.mounts import fill, run_on_small_disk
from log_torture.verdict import assert_readable
from processes import run_and_kill

from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.tools.exit_codes import ExitCode
from kvledger.adapters.vllm.configuration import ConnectorSettings
from kvledger.adapters.vllm.event_log import OpenedLog, open_event_log
from kvledger.adapters.vllm.journal import Journal
from kvledger.lifecycle import Core, PageJob
from kvledger.lifecycle import events as e
from kvledger.storage.events import read_log
from kvledger.storage.events.segment_file import segment_paths

_DISK = 1 << 20


@attrs.frozen
class Served:
    """A walk's observations, and the log that they are written to."""

    journal: Journal
    observations: list[e.Event]

    @classmethod
    def on(cls, log_dir: Path, **settings: object) -> Served:
        """Open a log as an engine start does."""
        driver = play_seed(5, 100, chunk_size=8, block_size=16)
        configuration = driver.configuration
        extra_config = {"log_dir": str(log_dir), "segment_bytes": 16384, **settings}
        log = open_event_log(Core.standard(), ConnectorSettings.from_extra_config(extra_config), configuration)
        observations = [event for event in driver.observed if not event.is_decision]
        return cls(Journal(Core.standard(), configuration, log), observations)

    @property
    def log(self) -> OpenedLog:
        """The log."""
        return self.journal.log

    def serve(self) -> list[PageJob]:
        """Observe and commit everything; the jobs that were handed out."""
        handed_out = []
        for event in self.observations:
            issued = [decision for decision in self.journal.observe(event) if isinstance(decision, PageJob)]
            if self.journal.commit():
                handed_out += issued
        return handed_out


def fill_with_own_log(log_dir: Path) -> None:
    """Fill the disk with logs of an engine that is then killed, to the last byte."""

    def work() -> None:
        served = Served.on(log_dir)
        for number in itertools.count():
            served.journal.observe(e.LogNote(f"note {number}: {'.' * 400}", number))
            if not served.journal.commit():
                break

    run_and_kill(work)
    fill(log_dir.parent)


@pytest.mark.parametrize("max_log_bytes", ["256KiB", "16GiB", None])
def test_a_disk_that_the_log_itself_filled_does_not_keep_an_engine_from_starting(
    tmp_path: Path, told: pytest.LogCaptureFixture, max_log_bytes: str | None
) -> None:
    """After `kill -9` vLLM did not start, even with a lower `max_log_bytes`. The oldest segments go, with a record."""
    disk = tmp_path / "disk"

    def work() -> None:
        fill_with_own_log(disk / "logs")
        (before,) = (disk / "logs").iterdir()
        num_segments = len(segment_paths(before))
        settings = {"segment_bytes": 16384, "max_log_bytes": max_log_bytes, "log_dir": str(disk / "logs")}
        assert ConnectorSettings.from_extra_config(settings).refuse_log_dir()
        served = Served.on(disk / "logs", max_log_bytes=max_log_bytes)
        warning = "the disk of log_dir was full: kvledger deleted the oldest segments to create this log"
        assert any(warning in message for message in told.messages)
        assert served.serve()
        # This log is written so fast that its maintenance may have the last room for a moment: then a frame waits.
        served.log.close()
        assert served.log.store.num_events_lost == 0
        assert 0 < len(segment_paths(before)) < num_segments
        for log in (before, served.log.directory):
            assert log is not None
            reader = read_log(log)
            assert list(reader)
            assert reader.damage == []
            assert_readable(log)

    run_on_small_disk(disk, _DISK, work)


def test_without_room_the_engine_starts_and_the_log_begins_as_soon_as_there_is_some(
    tmp_path: Path, told: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where a disk fills while serving: nothing is handed out that is not in the log, and no event is lost."""
    disk = tmp_path / "disk"

    def work() -> None:
        (disk / "logs").mkdir()
        ballast = fill(disk)
        served = Served.on(disk / "logs")
        (message,) = told.messages
        assert (
            "the log cannot be created because its disk is full and deleting old logs freed too little: delete other"
            in message
        )
        assert served.serve() == []
        assert not list((disk / "logs").iterdir())
        ballast.unlink()
        served.log.store.flush()
        assert any("the log can be written again" in message for message in told.messages)
        served.journal.observe(e.LogNote("room again", 1))
        assert served.journal.commit()
        served.log.close()
        main(["verify", str(served.log.directory), "--json"])
        verdict = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (verdict["num_damage"], verdict["num_divergences"]) == (0, 0)
        assert verdict["num_events"] == served.journal.ledger.next_sequence - 1

    run_on_small_disk(disk, _DISK, work)


def test_a_log_that_never_got_room_says_at_shutdown_what_is_lost_and_leaves_nothing(
    tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    """No directory that looks like a log."""
    disk = tmp_path / "disk"

    def work() -> None:
        (disk / "logs").mkdir()
        fill(disk)
        served = Served.on(disk / "logs")
        served.serve()
        served.log.close()
        assert "events that could not be written" in told.messages[-1]
        assert not list((disk / "logs").iterdir())

    run_on_small_disk(disk, _DISK, work)


def test_retire_works_on_a_disk_that_the_log_filled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `--dry-run` says is what goes, and what is left has a beginning, or says why it has none."""
    disk = tmp_path / "disk"

    def work() -> None:
        fill_with_own_log(disk / "logs")
        (log,) = (disk / "logs").iterdir()

        def retire(*options: str) -> list[Any]:
            assert main(["retire", str(log), "--max-bytes", "256KiB", "--json", *options]) == ExitCode.SOUND
            records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            return [each["segment"] for each in records if each["type"] == "retirement"]

        told = retire("--dry-run")
        assert told
        assert retire() == told
        assert_readable(log)
        assert main(["verify", str(log)]) != ExitCode.DAMAGED

    run_on_small_disk(disk, _DISK, work)
