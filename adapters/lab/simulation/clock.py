"""The clock of a simulation. The simulation decides how time passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class SimulatedClock:
    """A clock that is called like `time.monotonic_ns`. Each call lets one nanosecond pass."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        """Return the time in nanoseconds."""
        self.now_ns += 1
        return self.now_ns

    def pass_ms(self, duration_ms: float) -> None:
        """Let time pass."""
        self.now_ns += int(duration_ms * 1e6)

    @contextlib.contextmanager
    def read_by(self, connector_class: Any) -> Iterator[None]:
        """Let connectors of this class read this clock, if they are created inside the `with` block."""
        real = connector_class.clock
        connector_class.clock = self
        try:
            yield
        finally:
            connector_class.clock = real
