"""Of the tokens lost to preemptions, the share that was computed again: the same worlds for every setup.

The worlds are those of `make sim` with the same seeds, pools, requests, aborts and bursts, but without the faults of
copies, reports and disks, which only kvledger is asked to survive, and without resets, which would drop what each of
them has kept. Connectors have their defaults, kvledger the chunk size that the seed drew. All are counted by the same
meter at vLLM's scheduler (`meter.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import attrs

from sim.connectors import COMPARED
from sim.faults import CLIENT_FAULTS
from sim.meter import Meter
from sim.settings import DIMENSIONS, Settings, draw
from sim.world import World

_DIMENSIONS = tuple(name for name in DIMENSIONS if name != "failing loads")
ROOM_FOR_ALL = 400
"""Host slots; no world uses as many."""


@attrs.frozen
class Row:
    """Meters over the worlds of one kind, by the name of the setup."""

    title: str
    includes: Callable[[Settings], bool]
    meters: dict[str, Meter] = attrs.field(factory=lambda: {setup.name: Meter() for setup in COMPARED})


def rows() -> tuple[Row, ...]:
    """All worlds, and those in which only device memory is short: what is lost there need never be computed again."""
    return (
        Row("all worlds", lambda _settings: True),
        Row("room for all on the host", lambda settings: settings.num_slots >= ROOM_FOR_ALL),
        Row(
            "room for all, one step in flight",
            lambda settings: settings.num_slots >= ROOM_FOR_ALL and not settings.async_scheduling,
        ),
    )


def measure(seeds: Iterable[int], *, advance: Callable[[], None] = lambda: None) -> tuple[Row, ...]:
    """Let every setup live every world."""
    measured = rows()
    for seed in seeds:
        drawn = draw(random.Random(f"settings {seed}")).connector
        defaults = {name: drawn[name] for name in ("host_bytes", "chunk_size")}
        for setup in COMPARED:
            with World(seed, setup=setup, faults=CLIENT_FAULTS, connector=defaults, dimensions=_DIMENSIONS) as world:
                world.run()
                for row in measured:
                    if row.includes(world.settings):
                        row.meters[setup.name].add(world.meter)
            advance()
    return measured
