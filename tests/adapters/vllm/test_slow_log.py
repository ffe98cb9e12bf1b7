"""A disk that takes no new file for a while: hooks go on, nothing leaves that is not in the log, the log is whole."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from lifecycle_driver import play_seed

from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.vllm.configuration import ConnectorSettings
from kvledger.adapters.vllm.event_log import OpenedLog
from kvledger.adapters.vllm.journal import Journal
from kvledger.lifecycle import Core, PageJob
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import log_header
from kvledger.storage.events import BacklogEventStore, SegmentEventStore

_PAUSE_SECONDS = 0.3
"""Six times what cost saves once; a third of the default."""


class _PausingFiles(SegmentEventStore):
    """Begins each segment after a pause, as on a busy machine."""

    num_pauses = 0

    def _start_segment(self) -> None:
        time.sleep(_PAUSE_SECONDS)
        self.num_pauses += 1
        super()._start_segment()


class _SlowFiles(SegmentEventStore):
    """Begins a segment when it is allowed to."""

    allowed = threading.Event()

    def _start_segment(self) -> None:
        self.allowed.wait()
        super()._start_segment()


@pytest.fixture(autouse=True)
def _allowed() -> None:
    _SlowFiles.allowed.clear()


def test_what_is_decided_while_a_file_is_waited_for_is_withheld_and_nothing_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each job of a frame that waits is reported as failed; what comes when the disk is back goes out again."""
    driver = play_seed(5, 150, chunk_size=8, block_size=16)
    configuration = driver.configuration
    header = log_header(Core.standard(), configuration)
    segments = _SlowFiles.create(tmp_path / "log", header, segment_bytes=16_384)
    log = OpenedLog(BacklogEventStore(segments, writes_alone=True, max_wait_ms=1), segments.directory)
    journal = Journal(Core.standard(), configuration, log)
    observations = [event for event in driver.observed if not event.is_decision]
    withheld: set[int] = set()
    for number, event in enumerate(observations):
        if number == len(observations) * 2 // 3:
            _SlowFiles.allowed.set()
            log.store.flush()
        issued = [decision for decision in journal.observe(event) if isinstance(decision, PageJob)]
        if not journal.commit():
            withheld.update(job.job_id for job in issued)
    assert withheld
    journal.commit()
    log.close()
    reports = (event for _, event in open_log(tmp_path / "log").events() if isinstance(event, e.TransferReported))
    unwritten = (report for report in reports if report.withheld == e.Withheld.UNWRITTEN.value)
    failed = {job_id for report in unwritten for job_id in report.job_ids}
    assert failed == withheld
    main(["verify", str(tmp_path / "log"), "--json"])
    verdict = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (verdict["num_damage"], verdict["num_divergences"]) == (0, 0)
    assert verdict["num_events"] == verdict["num_events_checked"] == journal.ledger.next_sequence - 1


def test_no_save_is_lost_because_a_busy_machine_paused(tmp_path: Path, told: pytest.LogCaptureFixture) -> None:
    """With the default settings. A pause of 50 ms was an error, and jobs of that step failed."""
    driver = play_seed(5, 60, chunk_size=8, block_size=16)
    configuration = driver.configuration
    header = log_header(Core.standard(), configuration)
    segments = _PausingFiles.create(tmp_path / "log", header, segment_bytes=16_384)
    store = BacklogEventStore(segments, writes_alone=True, max_wait_ms=ConnectorSettings().max_log_wait_ms)
    journal = Journal(Core.standard(), configuration, OpenedLog(store, segments.directory))
    for event in driver.observed:
        if not event.is_decision:
            journal.observe(event)
            assert journal.commit()
    journal.log.close()
    assert segments.num_pauses
    assert not [message for message in told.messages if "the log" in message and "disk" in message]
