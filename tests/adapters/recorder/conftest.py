"""Engines whose connector is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sim.connectors import Recorded
from sim.recorded import recordings
from sim.witness import PlainWitness

from kvledger.adapters.lab.simulation.connectors import ConnectorSetup, Offloading
from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.tools.cli.main import main


@pytest.fixture
def record() -> Iterator[Callable[..., tuple[Any, Any]]]:
    """An engine with OffloadingConnector or another one inside of a recorder, and the recording of the outermost."""
    engines = []

    def start(
        inner: ConnectorSetup | None = None, *, setup: ConnectorSetup | None = None, **options: Any
    ) -> tuple[Any, Any]:
        options = {"num_blocks": 60, "host_bytes": 1 << 22, "chunk_size": 16, **options}
        engine = SimulatedEngine(setup=setup or Recorded(inner=inner or Offloading()), **options)
        engines.append(engine)
        return engine, next(recordings(engine.scheduler.connector))

    yield start
    for engine in engines:
        engine.shutdown()


@pytest.fixture
def on_hook(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], None]], None]:
    """Say what a connector of `sim.witness` does first in each hook, for the length of a test."""
    return lambda do: monkeypatch.setattr(PlainWitness, "on_hook", staticmethod(do))


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The exit code of a command and what it printed."""

    def run(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        exit_code = main([str(argument) for argument in arguments])
        return exit_code, capsys.readouterr().out

    return run
