"""Several engines on one `log_dir`, as data-parallel engines have it: each log stays readable, or says why not."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from lifecycle_driver import play_seed
from log_torture.verdict import assert_readable

from kvledger.adapters.vllm.configuration import ConnectorSettings
from kvledger.adapters.vllm.event_log import open_event_log
from kvledger.adapters.vllm.journal import Journal
from kvledger.lifecycle import Core
from kvledger.storage.events import MAX_EXCESS_SEGMENTS, read_log
from kvledger.storage.events.retirements import read_retirements
from kvledger.storage.events.segment_file import segment_paths

_SEGMENT_BYTES = 16_384


def serve(log_dir: Path, max_log_bytes: int, num_rounds: int) -> None:
    """Write what a walk's hooks see into a log of one's own; snapshots are made by the real command."""
    driver = play_seed(5, 150, chunk_size=8, block_size=16)
    extra_config = {"log_dir": str(log_dir), "segment_bytes": _SEGMENT_BYTES, "max_log_bytes": max_log_bytes}
    settings = ConnectorSettings.from_extra_config(extra_config)
    log = open_event_log(Core.standard(), settings, driver.configuration)
    journal = Journal(Core.standard(), driver.configuration, log)
    for _ in range(num_rounds):
        for event in driver.observed:
            if not event.is_decision:
                journal.observe(event)
                journal.commit()
    log.close()


def _logs(log_dir: Path) -> list[Path]:
    return sorted(path for path in log_dir.iterdir() if path.is_dir())


@pytest.mark.parametrize("num_segments", [3, 6, 40])
def test_engines_that_share_a_log_dir_leave_no_log_that_is_silently_unreadable(
    tmp_path: Path, num_segments: int
) -> None:
    """Two servers with 256 KiB segments and a limit of 1 MiB left logs that read as sound, with 0 events checked."""
    fork = multiprocessing.get_context("fork")
    for num_engines in (2, 1):  # and a start after both have ended
        arguments = (tmp_path, num_segments * _SEGMENT_BYTES, 2)
        engines = [fork.Process(target=serve, args=arguments) for _ in range(num_engines)]
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.join()
        assert [engine.exitcode for engine in engines] == [0] * num_engines
        for log in _logs(tmp_path):
            reader = read_log(log)
            assert list(reader)
            assert reader.damage == []
            assert_readable(log)
    assert [each for log in _logs(tmp_path) for each in read_retirements(log)]
    num_bytes = sum(path.stat().st_size for log in _logs(tmp_path) for path in segment_paths(log))
    assert num_bytes <= (num_segments + MAX_EXCESS_SEGMENTS) * _SEGMENT_BYTES
