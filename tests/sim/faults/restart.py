"""The engine dies as after SIGKILL, and another one starts with a new log and serves who is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.faults.fault import Fault

if TYPE_CHECKING:
    from sim.world import World


class Restart(Fault):
    """Once or twice in a world."""

    name = "restart"
    chance = 0.15

    def __init__(self, world: World) -> None:
        super().__init__(world)
        world.needs_files = True
        num_steps = world.settings.num_steps
        self._at = {self.rng.randrange(5, num_steps) for _ in range(self.rng.choice([1, 2]))}

    def before_step(self) -> None:
        """Die, start again."""
        if self.world.num_steps in self._at and not self.world.is_draining:
            self.note("the engine is killed")
            self.world.restart()
