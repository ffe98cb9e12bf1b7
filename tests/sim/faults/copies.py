"""Copies fail on the worker, as with a full or broken host. Nothing has moved then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.faults.fault import Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.world import World


class FailingCopies(Fault):
    """Some saves raise, and some loads where vLLM survives that: always beside the steps, not always within one.

    Two holes of vLLM 0.32 itself that no connector can close: with prefix caching a sharer goes on with blocks whose
    load failed (vllm#49250), and with two steps in flight the second one has read them already.
    """

    name = "failing copies"
    chance = 0.35

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._share = self.rng.choice([0.02, 0.2])
        settings = world.settings
        self.loads_fail = not settings.enable_prefix_caching and not settings.async_scheduling

    def attach(self) -> None:
        """Stand between the worker and its engines."""
        for name in ("save", "start_save", "start_load", *(("load",) if self.loads_fail else ())):
            self.world.copies.wrap(name, self._perhaps)

    def _perhaps(self, name: str, copy: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*arguments: Any) -> Any:
            if self.rng.random() < self._share:
                self.note(f"a {name} fails")
                message = "a copy that this seed breaks"
                raise RuntimeError(message)
            return copy(*arguments)

        return failing
