"""Of the tokens lost to preemptions, the share that was computed again: the same worlds for every contender.

The worlds are those of `make sim` with the same seeds, pools, requests, aborts and bursts, but without the faults of
copies, reports and disks, which only kvledger is asked to survive, and without resets, which would drop what each of
them has kept. Connectors have their defaults, kvledger the chunk size that the seed drew. All are counted by the same
meter at vLLM's scheduler (`meter.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from sim.contenders import CONTENDERS
from sim.faults import CLIENT_FAULTS
from sim.meter import Meter
from sim.settings import draw
from sim.world import World


def measure(seeds: Iterable[int], *, advance: Callable[[], None] = lambda: None, **changes: Any) -> dict[str, Meter]:
    """Name of the contender -> its meter over all worlds."""
    meters = {contender.name: Meter() for contender in CONTENDERS}
    for seed in seeds:
        drawn = draw(random.Random(f"settings {seed}")).connector
        defaults = {name: drawn[name] for name in ("host_bytes", "chunk_size")}
        for contender in CONTENDERS:
            with World(seed, contender=contender, faults=CLIENT_FAULTS, connector=defaults, **changes) as world:
                world.run()
                _add(meters[contender.name], world.meter)
            advance()
    return meters


def _add(total: Meter, more: Meter) -> None:
    for field in attrs.fields(Meter):
        if field.name.startswith("num_"):
            setattr(total, field.name, getattr(total, field.name) + getattr(more, field.name))
