"""The prefix cache is reset, as before new weights: with or without running requests, with or without kvledger's own.

Where everything is reset and no step is in flight, new weights are loaded: whatever was kept is wrong KV from then on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from sim.faults.fault import Fault

if TYPE_CHECKING:
    from sim.world import World


class Resets(Fault):
    """Once, or several times without a step between them."""

    name = "resets"
    chance = 0.35

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._share = self.rng.choice([0.005, 0.03])

    def before_step(self) -> None:
        """Reset one to three times."""
        num_times = self.rng.choice([1, 1, 2, 3])
        kinds = [(self.rng.random() < 0.7, self.rng.random() < 0.5) for _ in range(num_times)]
        if self.rng.random() >= self._share or self.world.is_draining:
            return
        for reset_running_requests, reset_connector in kinds:
            if reset_running_requests and self._is_loading() and not self.world.settings.fragile_steps:
                continue
            self.note(f"running requests {reset_running_requests}, connector {reset_connector}")
            try:
                self.world.engine.scheduler.reset_prefix_cache(
                    reset_running_requests=reset_running_requests, reset_connector=reset_connector
                )
            except RuntimeError:
                # So does a reset that finds blocks kept for a step in flight, or for a copy of a finished request.
                self.note("vLLM refuses: blocks are in use")
                continue
            if reset_running_requests and reset_connector and not self.world.engine.is_computing:
                self.note("new weights")
                self.world.load_new_weights()

    def _is_loading(self) -> bool:
        # vLLM 0.32 raises from a reset that comes while a request waits for an asynchronous load (scheduler.py), after
        # it has preempted all that run.
        requests = self.world.engine.scheduler.requests.values()
        return any(request.status is RequestStatus.WAITING_FOR_REMOTE_KVS for request in requests)
