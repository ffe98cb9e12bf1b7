"""The HTML page of a large log: another process verifies the log while this process reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver, play_seed
from stored_logs import header_of, serve_many, tell_story, write_log

from kvledger.adapters.tools.logs import remote_verification
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.processes import SeparateProcesses, separate_processes
from kvledger.adapters.tools.logs.remote_verification import RemoteVerification, begin_verification
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.verification import Verification
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import encode_events
from kvledger.storage.events import SegmentEventStore


@pytest.fixture
def others() -> Iterator[SeparateProcesses]:
    """One process besides this one."""
    with separate_processes(1) as started:
        yield started


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A directory with a sound log, a log that breaks rules, and a damaged log."""
    sound, walked, story = serve_many(150), play_seed(3, 140, chunk_size=16, block_size=16), tell_story()
    write_log(tmp_path / "logs/sound", sound.observed, sound.configuration)
    write_log(tmp_path / "logs/broken", walked.observed, walked.configuration)
    damaged = write_log(tmp_path / "logs/damaged", story.observed, story.configuration)
    (segment,) = damaged.glob("*.kvlog")
    written = bytearray(segment.read_bytes())
    written[len(written) // 2] ^= 255
    segment.write_bytes(written)
    return tmp_path / "logs"


@pytest.mark.parametrize("part", [(), ("--since", "9", "--until", "60")])
def test_the_page_is_the_same_whichever_process_verifies_the_logs(
    run: Any, logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: tuple[str, ...]
) -> None:
    """Findings, evidence and verdicts of sound, broken and damaged logs."""
    own, other = tmp_path / "own.html", tmp_path / "other.html"
    expected = run("export", logs, "--html", *part, "-o", own)
    monkeypatch.setattr(remote_verification, "MIN_BYTES", 0)
    result = run("export", logs, "--html", *part, "-o", other)
    assert other.read_text() == own.read_text()
    assert result.exit_code == expected.exit_code
    assert result.err.replace("other.html", "own.html") == expected.err


MORTAL = """
import os, signal
from multiprocessing import parent_process
from kvledger.lifecycle.handlers import New

class Mortal(New):
    def lookup_requested(self, turn, event):
        if parent_process() is not None:
            open("killed", "a").close()
            os.kill(os.getpid(), signal.SIGKILL)
        super().lookup_requested(turn, event)
"""
"""A handler that kills every other process that makes decisions again."""


def test_a_log_is_verified_in_this_process_if_the_other_process_is_killed(
    run: Any, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page misses nothing, for example if the machine has too little memory for two processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "mortal.py").write_text(MORTAL)
    command = ("export", log, "--html", "--handlers", "mortal:Mortal", "-o")
    assert run(*command, "own.html").exit_code == 0
    monkeypatch.setattr(remote_verification, "MIN_BYTES", 0)
    assert run(*command, "other.html").exit_code == 0
    assert Path("killed").exists()
    assert Path("other.html").read_text() == Path("own.html").read_text()


def test_both_readings_end_at_the_same_event_of_a_log_that_grows(
    story: Driver, tmp_path: Path, others: SeparateProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict covers exactly the events that the page shows."""
    monkeypatch.setattr(remote_verification, "MIN_BYTES", 0)
    store = SegmentEventStore.create(tmp_path / "log", header_of(story.configuration))
    store.append(encode_events(story.observed[:20]), 20)
    log = open_log(tmp_path / "log")
    end = log.end_so_far()
    store.append(encode_events([e.LogNote("more", 10**9)]), 1)
    verification = begin_verification(log, Selection(), end, others, open_log)
    assert [batch.last_sequence for batch in log.batches_so_far(end=end)] == [20]
    assert verification.findings().judgement.num_events == 20
    store.close()


def test_a_verification_of_another_part_of_the_log_is_made_again_in_this_process(
    story: Driver, tmp_path: Path, others: SeparateProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention may delete segments before the other process opens the log. Its outcome is then about another part."""
    monkeypatch.setattr(remote_verification, "MIN_BYTES", 0)
    log = open_log(write_log(tmp_path / "log", story.observed, story.configuration))
    other = write_log(tmp_path / "other", story.observed[:20], story.configuration)
    end = log.end_so_far()
    outcome = others.submit(remote_verification._outcome_in_other_process, open_log, other, Selection(), end)
    assert outcome.result().last_sequence == 20
    for _ in log.batches_so_far(end=end):
        pass
    findings = RemoteVerification(log, Selection(), end, outcome).findings()
    assert findings.judgement.num_events == len(story.observed)


def test_a_small_log_is_verified_in_this_process(log: Path, others: SeparateProcesses) -> None:
    """The start of a process takes longer."""
    opened = open_log(log)
    verification = begin_verification(opened, Selection(), opened.end_so_far(), others, open_log)
    assert isinstance(verification, Verification)
