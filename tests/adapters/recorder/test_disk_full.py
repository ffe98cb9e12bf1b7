"""The recorder's logs on a disk that is really full: the connector's calls go on, and `verify` tells what is lost."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from log_torture.mounts import fill, run_on_small_disk
from sim.connectors import Recorded
from sim.recorded import recordings

from kvledger.adapters.lab.simulation.connectors import Offloading
from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.tools.cli.main import main

pytestmark = pytest.mark.scheduler


class Told(logging.Handler):
    """What people are told."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Remember it."""
        self.lines.append(record.getMessage())

    def count(self, words: str, log: str) -> int:
        """How often something was said of a log."""
        return sum(words in line and log in line for line in self.lines)


def serve(log_dir: Path | None, between: Callable[[Any], None]) -> tuple[Any, list[Any]]:
    """Three rounds of a crowd that preempts one another; something happens before the second and before the third."""
    engine = SimulatedEngine(
        setup=Recorded(inner=Offloading(num_questions=2)),
        num_blocks=12,
        max_model_len=160,
        host_bytes=1 << 22,
        log_dir=None if log_dir is None else str(log_dir),
    )
    steps = []
    for number in range(3):
        for request_id, first in (("a", 0), ("b", 500), ("c", 900)):
            engine.add(f"{request_id}{number}", range(first, first + 64), 40)
        engine.run()
        steps.append(engine.num_steps)
        if number < 2:
            between(engine)
    outcome = [engine.outputs, steps]
    engine.shutdown()
    return engine, outcome


@pytest.mark.parametrize("max_backlog_bytes", [None, 3000], ids=["a short outage", "an outage that outlasts memory"])
def test_a_full_disk_changes_nothing_for_the_connector_and_people_are_told_once(
    tmp_path: Path, max_backlog_bytes: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Same outputs in the same steps; what waits is written when there is space, what did not fit is named as lost."""
    disk, kept, figures = tmp_path / "disk", tmp_path / "kept", tmp_path / "figures.json"
    _, expected = serve(None, lambda _engine: None)

    def serve_on_full_disk() -> None:
        told, ballast = Told(), []
        logging.getLogger("vllm.kvledger").addHandler(told)
        logs: list[Any] = []

        def between(engine: Any) -> None:
            (recording,) = recordings(engine.scheduler.connector)
            store = recording.log.log.store
            if ballast:
                assert store.is_behind
                ballast[0].unlink()
                logs.append(recording.log.log)
            else:
                store._max_backlog_bytes = max_backlog_bytes or store._max_backlog_bytes
                ballast.append(fill(disk))

        _, outcome = serve(disk / "logs", between)
        assert outcome == expected
        shutil.copytree(disk / "logs", kept)
        (log,) = logs
        counts = {
            words: told.count(words, log.directory.name)
            for words in ("cannot be written", "can be written again", "recorder has stopped")
        }
        figures.write_text(json.dumps({**counts, "lost": log.store.num_events_lost, "log": log.directory.name}))

    run_on_small_disk(disk, 1 << 20, serve_on_full_disk)
    told = json.loads(figures.read_text())
    assert told["cannot be written"] == told["can be written again"] == 1
    assert told["recorder has stopped"] == 0
    exit_code = main(["verify", str(kept / told["log"]), "--json"])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    damage = [record for record in records if record["type"] == "damage"]
    assert sum(int(record["detail"].split()[0]) for record in damage) == told["lost"]
    assert (exit_code, bool(told["lost"])) == ((0, False) if max_backlog_bytes is None else (2, True))
