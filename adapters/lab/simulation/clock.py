"""The clock of a simulation, which decides how time passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class SimulatedClock:
    """Called like `time.monotonic_ns`. Every reading is a nanosecond later than the one before."""

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
        """Let connectors of this class that are built inside read this clock."""
        real = connector_class.clock
        connector_class.clock = self
        try:
            yield
        finally:
            connector_class.clock = real
