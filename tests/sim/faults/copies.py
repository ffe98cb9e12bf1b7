"""Copies fail on the worker, as with a full or broken host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.faults.fault import Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sim.world import World


class FailingCopies(Fault):
    """Some saves and some loads raise; what a failed load should have filled holds garbage.

    Loads within a step fail only where nothing is shared and one step is in flight, unless `loads_fail_anywhere` says
    more, and never where `recomputes_too_late`.
    """

    name = "failing copies"
    chance = 0.35

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._share = self.rng.choice([0.02, 0.2])
        settings = world.settings
        if settings.loads_fail_anywhere:
            self._share = self.rng.choice([0.1, 0.5])
            self.loads_fail = not settings.recomputes_too_late
        else:
            self.loads_fail = not settings.enable_prefix_caching and not settings.async_scheduling

    def attach(self) -> None:
        """Stand between the worker and its engines."""
        for name in ("save", "async_save", "async_load", *(("load",) if self.loads_fail else ())):
            self.world.copies.wrap(name, self._perhaps)

    def _perhaps(self, name: str, copy: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*arguments: Any) -> Any:
            if self.rng.random() < self._share:
                self.note(f"a {name} fails")
                message = "a copy that this seed breaks"
                if name.endswith("load"):
                    self._fill_with_garbage(arguments[1])
                raise RuntimeError(message)
            return copy(*arguments)

        return failing

    def _fill_with_garbage(self, block_ids: Sequence[int]) -> None:
        for tensor in self.world.engine.model.kv_caches.values():
            tensor[list(block_ids)] = -1
