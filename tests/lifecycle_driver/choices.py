"""Where a small world gets its choices from."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol, TypeVar

_Option = TypeVar("_Option")


class Choices(Protocol):
    """Answers what happens, how much, and to which."""

    def chance(self, probability: float) -> bool:
        """Whether it happens."""

    def randint(self, a: int, b: int) -> int:
        """One of the numbers from `a` to `b`."""

    def choice(self, seq: Sequence[_Option]) -> _Option:
        """One of several."""


class Seeded(Random):
    """Choices that follow from a seed."""

    def chance(self, probability: float) -> bool:
        """Whether it happens."""
        return self.random() < probability
