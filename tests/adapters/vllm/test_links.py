"""An engine starts and serves next to links, pipes and whatever else somebody has put into its `log_dir`.

A security review found that a link in an old log let an engine's start overwrite what it led to, and that a pipe in the
place of `writer.lock` let the start hang.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver
from planted_files import FOREIGN, KINDS, plant
from stored_logs import serve_many, write_log

from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.vllm.configuration import ConnectorSettings
from kvledger.adapters.vllm.event_log import WorkerOfLog, open_event_log
from kvledger.lifecycle import ConfigurationError, Core, LedgerConfiguration
from kvledger.storage.events import read_log
from kvledger.storage.events.segment_file import segment_paths

pytestmark = [pytest.mark.scheduler, pytest.mark.timeout(600)]  # the limit ends what waits for a pipe

LIMITS = {"segment_bytes": 16_384, "max_log_bytes": 3 * 16_384, "max_log_age_hours": 1}
PLACES = ("writer.lock", "retired.jsonl", "log.end", "segment", "snapshot", "directory", "record of log_dir")


@pytest.fixture(scope="module")
def served() -> Driver:
    """What fills several segments."""
    return serve_many(300)


def _serve(log_dir: Path, **options: Any) -> Path:
    """Start a connector on `log_dir`, serve a request that is preempted by others, and return its log."""
    logs = set(log_dir.iterdir())
    engine = SimulatedEngine(num_blocks=14, chunk_size=8, host_bytes=1 << 20, log_dir=str(log_dir), **LIMITS, **options)
    for number in range(4):
        engine.add(str(number), range(100 * number, 100 * number + 40), 40)
    engine.run()
    engine.shutdown()
    (log,) = (path for path in set(log_dir.iterdir()) - logs if path.is_dir())
    return log


def _place(log: Path, name: str) -> Path:
    segments = segment_paths(log)
    if name == "directory":
        return log.parent / "29991231T235959Z-1-000000"
    if name == "record of log_dir":
        return log.parent / "retired.jsonl"
    found = {"segment": segments[0], "snapshot": segments[1].with_suffix(".snapshot")}
    return found.get(name, log / name)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_starts_and_serves_next_to_what_is_no_file_of_a_log(
    told: Any, served: Driver, tmp_path: Path, place: str, kind: str
) -> None:
    """Its own log is whole, the foreign file stays as it is, and a warning names what kvledger does not open."""
    log_dir = tmp_path / "logs"
    old = write_log(log_dir / "20200101T000000Z-1-000000", served.observed, served.configuration, segment_bytes=16_384)
    assert len(segment_paths(old)) > 5
    path = _place(old, place)
    for segment in segment_paths(old):
        os.utime(segment, (0, 0))  # so that the whole log is to go
    planted = plant(path, kind, tmp_path / "victim")
    reader = read_log(_serve(log_dir))
    assert list(reader)
    assert reader.damage == []
    planted.check_untouched()
    if kind in FOREIGN and place in {"writer.lock", "retired.jsonl", "segment", "record of log_dir"}:
        (warning,) = [message for message in told.messages if str(path) in message]
        assert "kvledger does not open" in warning
        assert "remove" in warning


def test_a_linked_log_in_log_dir_is_left_alone_and_named_once(told: Any, served: Driver, tmp_path: Path) -> None:
    """Retention deleted segments of a log that is in another directory."""
    elsewhere = write_log(tmp_path / "mine" / "log", served.observed, served.configuration, segment_bytes=16_384)
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    log_dir = tmp_path / "logs"
    log_dir.mkdir()
    link = log_dir / "20200101T000000Z-1-000000"
    link.symlink_to(elsewhere)
    log = _serve(log_dir)
    (log_dir / "latest").symlink_to(log.name)
    _serve(log_dir)
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before
    named = [message for message in told.messages if "symbolic link" in message]
    assert [str(link) in message for message in named] == [True] * 2  # one of each start


def test_log_dir_itself_may_be_a_link(tmp_path: Path) -> None:
    """It is the operator's own choice."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "logs").symlink_to(tmp_path / "disk")
    log = _serve(tmp_path / "logs")
    assert (tmp_path / "disk" / log.name).is_dir()
    assert list(read_log(log))


def test_a_log_dir_that_is_a_link_to_nothing_is_refused_at_start(tmp_path: Path) -> None:
    """The error names it, the reason and the remedy."""
    (tmp_path / "logs").symlink_to(tmp_path / "nowhere")
    settings = ConnectorSettings.from_extra_config({"log_dir": str(tmp_path / "logs")})
    configuration = LedgerConfiguration(block_size=16, chunk_size=16, num_slots=8)
    with pytest.raises(ConfigurationError, match=r"logs is a symbolic link that leads to nothing.*name a writable"):
        open_event_log(Core.standard(), settings, configuration)


def test_logs_of_a_scheduler_and_a_worker_are_writable_by_their_owner_only_with_any_umask(tmp_path: Path) -> None:
    """With umask 0, which containers have, every local user could write there."""
    before = os.umask(0)
    try:
        (tmp_path / "logs").mkdir(mode=0o755)
        _serve(tmp_path / "logs")
        settings = ConnectorSettings.from_extra_config({"log_dir": str(tmp_path / "new" / "logs")})
        configuration = LedgerConfiguration(block_size=16, chunk_size=16, num_slots=8)
        open_event_log(Core.standard(), settings, configuration, worker=WorkerOfLog("engine", 0)).close()
    finally:
        os.umask(before)
    for made in (tmp_path / "logs", tmp_path / "new"):
        for path in (made, *made.rglob("*")):
            assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path
