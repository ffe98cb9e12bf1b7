"""Time in a simulation: it passes when the simulation says so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class SimulatedClock:
    """Called like `time.monotonic_ns`. Every reading is a nanosecond later than the one before."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        """Nanoseconds."""
        self.now_ns += 1
        return self.now_ns

    def pass_ms(self, duration_ms: float) -> None:
        """Let time pass."""
        self.now_ns += int(duration_ms * 1e6)

    @contextlib.contextmanager
    def read_by(self, connector_class: Any) -> Iterator[None]:
        """Connectors of this class that are built inside read this clock and no other."""
        real = connector_class.clock
        connector_class.clock = self
        try:
            yield
        finally:
            connector_class.clock = real
