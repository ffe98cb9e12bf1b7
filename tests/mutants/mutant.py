"""What a mutant is: one mistake, the rule that must name it, the incidents it re-enacts, and where it is driven."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import attrs

from mutants.scenes import Scene

Patch = tuple[Any, str, Any]
"""(owner, name, replacement): what is another while the scene is played."""


class Touch:
    """Called by a mistake whenever it makes a difference; remembers where the log was the first time."""

    def __init__(self) -> None:
        self.first_sequence: int | None = None
        self.next_sequence: Callable[[], int] = lambda: 0
        """Set by the scene, once there is a ledger."""

    def __call__(self) -> None:
        """It makes a difference now."""
        if self.first_sequence is None:
            self.first_sequence = self.next_sequence()


@attrs.frozen
class Mutant:
    """One mistake that a connector has made, made again."""

    rule: str
    """The rule that must name it, alone and first."""
    sentence: str
    incidents: tuple[str, ...]
    scene: Scene
    patches: Callable[[Touch], Sequence[Patch]]
    beside: frozenset[str] = frozenset()
    """Rules that the same mistake breaks as well, now and then before that one."""

    @property
    def name(self) -> str:
        """A word for command lines: the name of the function that makes the mistake."""
        return self.patches.__name__

    @contextlib.contextmanager
    def switched_on(self, touch: Touch) -> Iterator[None]:
        """Make the mistake as long as the context lasts."""
        with contextlib.ExitStack() as stack:
            for owner, name, replacement in self.patches(touch):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, replacement)
            yield


MUTANTS: dict[str, Mutant] = {}
"""Name -> mutant, in the order in which `catalogue/` declares them."""


def mutant(
    rule: str, *incidents: str, scene: Scene, beside: Collection[str] = ()
) -> Callable[[Callable[[Touch], Sequence[Patch]]], Callable[[Touch], Sequence[Patch]]]:
    """Declare the mistake that the decorated function returns as patches; its docstring is the mutant's sentence."""

    def declare(patches: Callable[[Touch], Sequence[Patch]]) -> Callable[[Touch], Sequence[Patch]]:
        sentence = " ".join((patches.__doc__ or "").split()).rstrip(".")
        declared = Mutant(rule, sentence[:1].lower() + sentence[1:], incidents, scene, patches, frozenset(beside))
        MUTANTS[declared.name] = declared
        return patches

    return declare
