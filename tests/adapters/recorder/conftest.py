"""Engines whose connector is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sim.recorded import recordings

from kvledger.adapters.simulation.contenders import Contender, Offloading, Recorded
from kvledger.adapters.simulation.engine import SimulatedEngine


@pytest.fixture
def record() -> Iterator[Callable[..., tuple[Any, Any]]]:
    """An engine with OffloadingConnector or another one inside of a recorder, and the recording of the outermost."""
    engines = []

    def start(inner: Contender | None = None, *, contender: Contender | None = None, **options: Any) -> tuple[Any, Any]:
        options = {"num_blocks": 60, "host_bytes": 1 << 22, "chunk_size": 16, **options}
        engine = SimulatedEngine(contender=contender or Recorded(inner=inner or Offloading()), **options)
        engines.append(engine)
        return engine, next(recordings(engine.scheduler.connector))

    yield start
    for engine in engines:
        engine.shutdown()
