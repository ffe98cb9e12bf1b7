"""What every fault is: it is told of each engine and each step, and sees what the worker sends."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput

    from kvledger.adapters.vllm.metadata import JobReport
    from sim.settings import Settings
    from sim.world import World


class Fault:
    """Does nothing. `note` what is done, so that a transcript tells it."""

    name: ClassVar[str]
    chance: ClassVar[float]
    """Of a world to have it."""
    breaks: ClassVar[frozenset[str]] = frozenset()
    """Rules that are broken because of it, and rightly reported."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = random.Random(f"{self.name} {world.seed}")

    @classmethod
    def suits(cls, settings: Settings) -> bool:  # noqa: ARG003 -- most suit all worlds
        """Whether a world with these settings may have it."""
        return True

    def attach(self) -> None:
        """A new engine stands in the world."""

    def before_step(self) -> None:
        """The next step is about to be scheduled."""

    def before_update(self, output: KVConnectorOutput | None) -> None:
        """A step has been computed, and the scheduler is about to hear of it."""

    def reports(self, reports: list[JobReport]) -> list[JobReport]:
        """What arrives of what the worker sends in this step."""
        return reports

    def repair(self) -> None:
        """The world is over; what is broken works again, so that what it kept can be written."""

    def detach(self) -> None:
        """The world ends: leave nothing changed outside of it."""

    def note(self, what: str) -> None:
        """Write it into the transcript."""
        self.world.note(f"{self.name}: {what}")
