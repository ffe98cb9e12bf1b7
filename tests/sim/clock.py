"""Time in a world: it passes by as much as the seed drew."""

from __future__ import annotations

import random

from kvledger.adapters.lab.simulation.clock import SimulatedClock


class VirtualClock(SimulatedClock):
    """What a step takes is drawn."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def pass_step(self) -> None:
        """Let one engine step's time pass: mostly milliseconds, now and then seconds."""
        self.pass_ms(self._rng.choice((2, 5, 9, 20, 3000)))
