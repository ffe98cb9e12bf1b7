"""Time in a world: it passes when the world says so, by as much as the seed drew."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

from kvledger.adapters.vllm import KVLedgerConnector


class VirtualClock:
    """A clock that is called like `time.monotonic_ns`. Every reading is a nanosecond later than the one before."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        """Nanoseconds since the world began."""
        self.now_ns += 1
        return self.now_ns

    def pass_step(self) -> None:
        """Let one engine step's time pass: mostly milliseconds, now and then seconds."""
        self.now_ns += self._rng.choice((2, 5, 9, 20, 3000)) * 1_000_000

    def pass_seconds(self, seconds: float) -> None:
        """Let something take long."""
        self.now_ns += int(seconds * 1e9)

    @contextlib.contextmanager
    def rules(self) -> Iterator[None]:
        """Connectors that are built inside read this clock and no other."""
        real = KVLedgerConnector.clock
        KVLedgerConnector.clock = self
        try:
            yield
        finally:
            KVLedgerConnector.clock = real
