"""What clients do to an engine: they go away, come all at once, and use their ids again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.faults.fault import Fault
from sim.settings import MAX_MODEL_LEN

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput

    from sim.settings import Settings
    from sim.world import World


class Aborts(Fault):
    """Some client goes away, whatever its request is doing."""

    name = "aborts"
    chance = 0.5

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._share = self.rng.choice([0.02, 0.08])

    def before_step(self) -> None:
        """Abort one of the requests that are alive."""
        place = self.rng.random()
        if self.rng.random() < self._share and not self.world.is_draining and self.world.alive:
            life = self.world.alive[int(place * len(self.world.alive))]
            self.note(f"{life.request_id} goes away")
            self.world.abort(life)


class AbortsInStep(Fault):
    """Some client goes away while a step is computed: mostly one whose load has failed in that very step."""

    name = "aborts in the step"
    chance = 1.0

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._share = self.rng.choice([0.0, 0.02])
        self._share_failed = self.rng.choice([0.2, 0.8])

    @classmethod
    def suits(cls, settings: Settings) -> bool:
        """Only where steps are fragile."""
        return settings.fragile_steps

    def before_update(self, output: KVConnectorOutput | None) -> None:
        """Abort the owner of a failed load, or anybody."""
        engine, place = self.world.engine, self.rng.random()
        failed = (
            set() if output is None else {*(output.failed_recving or ()), *engine.holders(output.invalid_block_ids)}
        )
        share = self._share_failed if failed else self._share
        if self.rng.random() < share and not self.world.is_draining:
            lives = [life for life in self.world.alive if not failed or life.request_id in failed]
            lives = [life for life in lives if life.request_id in engine.scheduler.requests]
            if lives:
                life = lives[int(place * len(lives))]
                self.note(f"{life.request_id} goes away{' as its load fails' if failed else ''}")
                self.world.abort(life)


class Storms(Fault):
    """A burst of requests as long as the model allows, urgent where the engine knows priorities: all others must go."""

    name = "storms"
    chance = 0.3

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._share = self.rng.choice([0.01, 0.03])

    def before_step(self) -> None:
        """Let the burst arrive."""
        num_requests = self.rng.randrange(2, 6)
        lengths = [self.rng.randrange(60, MAX_MODEL_LEN - 20) for _ in range(num_requests)]
        if self.rng.random() < self._share and not self.world.is_draining:
            self.note(f"{num_requests} long requests at once")
            for length in lengths:
                prompt = self.world.tokens(self.rng, length)
                self.world.arrive(prompt, min(40, MAX_MODEL_LEN - length), priority=-1)


class ReusedIds(Fault):
    """A request takes the id of one that has just ended, while jobs of that one may still be in flight.

    Only where no step is in flight: with two, vLLM itself gives the output of the old request's last step to the new
    one. vLLM's front ends make ids unique, so this is more than a client can do.
    """

    name = "reused ids"
    chance = 0.3

    def before_step(self) -> None:
        """Take the id of the last request that ended."""
        length, max_tokens = self.rng.randrange(1, 60), self.rng.randrange(1, 40)
        ended = self.world.ended_in_last_step
        reuses = self.rng.random() < 0.2 and not self.world.is_draining and not self.world.settings.async_scheduling
        if reuses and ended:
            self.note(f"{ended[-1].request_id} is used again")
            self.world.arrive(self.world.prompt(self.rng, length), max_tokens, request_id=ended[-1].request_id)
