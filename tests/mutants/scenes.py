"""The simulations that drive a mutant, each from a seed to the log of one engine.

Nobody watches for wrong KV here, as nobody does in production: a mistake shall go on until the log shows it, or until
vLLM itself falls over it. The log ends there then.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import attrs

from kvledger.lifecycle import LedgerConfiguration
from kvledger.lifecycle.replay import SequencedEvent

MAX_DRAINING_STEPS = 300
SequenceOf = Callable[[], int]


@attrs.frozen
class Story:
    """What a scene has left: a log, under which configuration, and what ended it early, if anything did."""

    configuration: LedgerConfiguration
    events: list[SequencedEvent]
    ended_by: str
    allowed_rules: frozenset[str] = frozenset()
    """Rules that a fault of the scene breaks, whatever the connector does."""


class Scene(Protocol):
    """Plays a seed. `told` is given the ledger's next sequence number as soon as there is a ledger."""

    title: str

    def play(self, seed: int, told: Callable[[SequenceOf], None]) -> Story:
        """Play it to the end, or as far as it goes."""


@attrs.frozen
class Walks:
    """A random walk of the pure core (`lifecycle_driver`): milliseconds a seed, no vLLM."""

    num_steps: int = 70
    is_reliable: bool = True
    """Whether every copy is reported, and once."""
    chunks_in_blocks: tuple[tuple[int, int], ...] = ((4, 16), (8, 16), (16, 16), (32, 16))
    """(tokens of a chunk, of a block), of which the seed chooses."""
    options: tuple[tuple[str, Any], ...] = ()
    """Settings of the ledger that are not left to the seed."""
    title: str = "walk"

    def play(self, seed: int, told: Callable[[SequenceOf], None]) -> Story:
        """Let the seed choose."""
        from lifecycle_driver import World
        from lifecycle_driver.choices import Seeded

        rng = random.Random(f"geometry {seed}")
        chunk_size, block_size = rng.choice(self.chunks_in_blocks)
        world = World(
            Seeded(seed),
            chunk_size=chunk_size,
            block_size=block_size,
            is_watched=False,
            is_reliable=self.is_reliable,
            **dict(self.options),
        )
        driver = world.driver
        told(lambda: driver.ledger.next_sequence)
        ended_by = _to_the_end(lambda: world.play(self.num_steps))
        driver.ledger.commit()
        allowed = frozenset() if self.is_reliable else frozenset({"COMPLETION_ONCE", "LIVENESS"})
        return Story(driver.configuration, driver.sink.events(), ended_by, allowed)


@attrs.frozen
class Worlds:
    """vLLM's real scheduler with a simulated worker (`sim`), clients and the faults that are asked for."""

    faults: frozenset[str] = frozenset({"aborts", "storms"})
    connector: tuple[tuple[str, Any], ...] = ()
    """Settings of the connector that are not left to the seed."""
    settings: tuple[tuple[str, Any], ...] = (("num_steps", 120),)
    """Settings of the engine that are not left to the seed."""
    num_slots: int | None = None
    """Slots of the host pool; None: as the seed draws."""
    closes: bool = False
    """Whether the engine is shut down in the end."""
    title: str = "vLLM's scheduler"

    def play(self, seed: int, told: Callable[[SequenceOf], None]) -> Story:
        """Let a world live."""
        from sim import world as worlds
        from sim.checks.rules import allowed_rules
        from sim.logs import read_end
        from sim.settings import draw

        from kvledger.adapters.lab.simulation.hashed_model import BLOCK_SIZE, block_bytes

        connector = draw(random.Random(f"settings {seed}")).connector | dict(self.connector)
        if self.num_slots is not None:
            connector["host_bytes"] = block_bytes(BLOCK_SIZE) * self.num_slots
        with _unwatched_world(), _replaced(worlds, "draw_faults", lambda _seed: self.faults):
            world = worlds.World(seed, dimensions=(), connector=connector, **dict(self.settings))
            with world:
                told(lambda: world.side.ledger.next_sequence)
                ended_by = _to_the_end(lambda: _live(world))
                if self.closes:
                    world.engine.connector.shutdown()
                world.side.ledger.commit()
                log = read_end(world.side)
                return Story(log.configuration, log.events, ended_by, allowed_rules(world))


@attrs.frozen
class FailedLoads:
    """The same engine in a story that is told: a load fails, a request ends in that step, others have its beginning."""

    ends: tuple[str, ...] = ("owner",)
    """Who may end in the step of the load, of which the seed chooses: its owner, or a sharer of its blocks."""
    title: str = "vLLM's scheduler"

    def play(self, seed: int, told: Callable[[SequenceOf], None]) -> Story:
        """Tell the story, with lengths that the seed draws."""
        from sim.broken_copies import break_copies
        from sim.logs import read_end

        from kvledger.adapters.lab.simulation.engine import SimulatedEngine

        rng = random.Random(f"failed loads {seed}")
        policy = rng.choice(["fail", "recompute"])
        with _unwatched_world():
            engine = SimulatedEngine(
                num_blocks=60,
                chunk_size=16,
                load_mode="sync",
                save_mode="sync",
                host_bytes=1 << 20,
                max_silent_ms=0,
                kv_transfer={"kv_load_failure_policy": policy},
            )
            side = engine.connector.scheduler_side
            told(lambda: side.ledger.next_sequence)
            beginning = [rng.randrange(512) for _ in range(rng.randrange(40, 100))]
            prompts = [[*beginning, *(rng.randrange(512) for _ in range(rng.randrange(1, 60)))] for _ in range(4)]
            ending = rng.choice(self.ends)
            engine.add("writer", beginning, 2)
            engine.run()
            engine.scheduler.reset_prefix_cache()
            break_copies(engine, "load", 1)
            engine.add("owner", prompts[0], 20)
            if ending != "owner":
                engine.add(ending, prompts[1], 20)
            scheduled = engine.scheduler.schedule()
            output = engine._execute(scheduled)
            engine.abort(ending)
            engine.scheduler.update_from_output(scheduled, output)
            for number, prompt in enumerate(prompts):
                engine.add(f"late {number}", prompt, 3)
                ended_by = _to_the_end(engine.run)
            side.ledger.commit()
            log = read_end(side)
            engine.shutdown()
            return Story(log.configuration, log.events, ended_by)


@attrs.frozen
class HybridWorlds:
    """The same around a model with sliding windows."""

    title: str = "vLLM's scheduler, hybrid model"

    def play(self, seed: int, told: Callable[[SequenceOf], None]) -> Story:
        """Let a world live."""
        from sim.hybrid_world import HybridWorld

        with _unwatched_world():
            world = HybridWorld(seed)
            told(lambda: world.side.ledger.next_sequence)
            ended_by = _to_the_end(world.run)
            world.side.ledger.commit()
            return Story(world.side.ledger.projections.configuration, list(world.events()), ended_by)


def _live(world: Any) -> None:
    while world.num_steps < world.settings.num_steps:
        world.step()
    world.is_draining = True
    last_step = world.num_steps + MAX_DRAINING_STEPS
    while (world.engine.scheduler.has_requests() or world.engine.is_computing) and world.num_steps < last_step:
        world.step()


def _to_the_end(play: Callable[[], None]) -> str:
    try:
        play()
    except Exception as error:  # noqa: BLE001 -- whatever a mistake leads to is part of the story
        return f"{type(error).__name__}: {error}"
    return ""


@contextlib.contextmanager
def _replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _unwatched_world() -> Iterator[None]:
    from sim.cached_blocks import CachedBlocks
    from sim.pages import PageWatch

    from kvledger.adapters.lab.simulation.hashed_model import HashedModel

    with (
        _replaced(CachedBlocks, "look", lambda *_: None),
        _replaced(HashedModel, "_check", lambda *_: None),
        _replaced(PageWatch, "raise_if_wrong", lambda _: None),
    ):
        yield
