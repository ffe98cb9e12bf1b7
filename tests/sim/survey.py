"""How a connector of vLLM's own lives: many worlds with a recorder around it, and what happened in each.

`python tests/sim/survey.py --connector simple-late --first 0 --seeds 200`. A seed decides the world: its clients, what
they and the engine do to it, with `--hybrid` the windows of its layers; `--sessions` are of another kind. With
`--failing-loads` half of the requests are loaded by another cache in the same `MultiConnector`, whose loads fail as the
seed says, since no worker of vLLM's own can be told to; LMCache's fail because its server does. Whatever is raised in a
recorded world is tried again without the recorder, so that one can tell whose it is.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs

if TYPE_CHECKING:
    from kvledger.adapters.lab.simulation.connectors import ConnectorSetup
    from kvledger.adapters.lab.simulation.engine import SimulatedEngine

WITHIN = {"load_mode": "sync", "save_mode": "sync", "max_silent_ms": 0}
"""Of kvledger as the wrapped one: how many steps an asynchronous copy takes is not fixed."""
WINDOWS = ((0, 48), (48, 0), (0, 64), (17, 0), (0, 32, 80))


def connectors() -> Mapping[str, Callable[[], ConnectorSetup]]:
    """Name -> how to make who is recorded."""
    from kvledger.adapters.lab.simulation.connectors import KVLEDGER, Offloading, SimpleCPU
    from sim.connectors import Example, Several
    from sim.lmcache_mp import LMCacheMP

    return {
        "kvledger": lambda: KVLEDGER,
        "offloading": Offloading,
        "offloading-late": lambda: Offloading(num_questions=2),
        "simple": SimpleCPU,
        "simple-late": lambda: SimpleCPU(num_questions=3),
        "simple-lazy": lambda: SimpleCPU(is_lazy=True),
        "simple-lazy-late": lambda: SimpleCPU(is_lazy=True, num_questions=3),
        "example": Example,
        "lmcache": lambda: LMCacheMP(chunk_size=16),
        "multi": lambda: Several(children=(Offloading(num_questions=1), SimpleCPU(num_questions=3))),
    }


@attrs.frozen
class Lived:
    """What became of a world."""

    faults: Sequence[str]
    raised: str = ""
    """The last line of the traceback, and where it was raised."""
    broken: tuple[str, ...] = ()
    """What the rules say of the log, and where it decides otherwise or folds to something else."""

    @property
    def kind(self) -> str:
        """To be counted by."""
        return self.raised or ", ".join(sorted({detail.split(":")[0] for detail in self.broken})) or "well"


def live(seed: int, inner: ConnectorSetup, *, is_recorded: bool, faults: frozenset[str], **settings: Any) -> Lived:
    """A world, and what the recorders say of it."""
    from sim.connectors import Recorded
    from sim.settings import draw
    from sim.world import World

    setup = Recorded(inner=inner, name=recorder_of(inner)) if is_recorded else inner
    if "neighbour" in settings:
        settings["neighbour"] = setup  # half of the requests are theirs
    drawn = {**draw(random.Random(f"settings {seed}")).connector, **WITHIN, "digests": "all"}
    world, raised = None, ""
    try:
        with World(seed, setup=setup, faults=faults, connector=drawn, **settings) as world:
            world.run()
    except Exception as error:  # noqa: BLE001 -- whatever it is, it is told with the seed
        raised = place_of(error)
    if world is None:
        return Lived((), raised)
    return Lived(world.fault_names, raised, tuple(broken_in(world.engine)))


def recorder_of(inner: ConnectorSetup) -> str:
    """Which of the two stands around it."""
    whole = {inner.name, *(child.name for child in getattr(inner, "children", ()))}
    return "KVLedgerRecorder" if whole & {"ExampleConnector", "LMCacheMPConnector"} else "KVLedgerRecorderHMA"


def failing(inner: ConnectorSetup, rng: random.Random, settings: dict[str, Any]) -> ConnectorSetup:
    """The same with loads that fail, and what vLLM is to do then; `settings` of the world are added to."""
    from sim.connectors import NamedConnector, Several

    settings["load_failure_policy"] = rng.choice(["recompute", "fail"])
    share, is_first = rng.choice([0.3, 1.0]), rng.random() < 0.5
    if inner.name == "LMCacheMPConnector":
        return attrs.evolve(inner, failure_share=share)  # type: ignore[call-arg] # it is that one
    # Within a step only where nothing is shared: vLLM 0.32 lets others read what failed there, whoever loads it.
    is_shared = settings.setdefault("enable_prefix_caching", False) or settings.get("windows")
    settings |= {} if is_shared else {"async_scheduling": False}
    options = {"num_tokens": rng.choice([20, 48, 90]), "num_steps": rng.choice([1, 4] if is_shared else [0, 1, 4])}
    options |= {"failure_share": share, "seed": rng.random()}
    cache = NamedConnector(name="Neighbour", module="sim.neighbour", options=options)
    settings["neighbour"] = several = Several(children=(cache, inner) if is_first else (inner, cache))
    return several


def place_of(error: Exception) -> str:
    """Class, place and message of what was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {error}"


def broken_in(engine: SimulatedEngine) -> Iterator[str]:
    """What the rules say of the logs of all recorders in an engine."""
    from kvledger.lifecycle.events import ExtensionStopped
    from sim.recorded import audited, events_of, recordings

    for recording in recordings(engine.scheduler.connector):
        audit = audited(recording)
        yield from (f"{each.rule}: {each.sequence} {each.request_id} {each.detail}" for each in audit.violations)
        yield from (f"divergence: {found}" for found in (*audit.divergences, *audit.reference_differences))
        yield from (f"stopped: {each}" for _, each in events_of(recording) if isinstance(each, ExtensionStopped))
        if audit.unfoldable:
            yield f"unfoldable: {audit.unfoldable}"


def live_sessions(seed: int, inner: ConnectorSetup, *, is_recorded: bool) -> Lived:
    """Streaming sessions of two or three turns, and others who say the same from the beginning, in a small pool."""
    from kvledger.adapters.lab.simulation.engine import SimulatedEngine
    from kvledger.adapters.lab.simulation.hashed_model import block_bytes
    from sim.connectors import Recorded

    rng = random.Random(f"sessions {seed}")
    engine = SimulatedEngine(
        setup=Recorded(inner=inner, name=recorder_of(inner)) if is_recorded else inner,
        num_blocks=rng.choice([16, 24, 40]),
        max_model_len=200,
        max_num_batched_tokens=rng.choice([32, 256]),
        enable_prefix_caching=inner.name != "ExampleConnector",
        async_scheduling=rng.random() < 0.4,
        host_bytes=block_bytes(16) * rng.choice([8, 60, 400]),
    )
    raised = ""
    try:
        turns = {f"session{number}": rng.choice([2, 3]) for number in range(3)}
        said: dict[str, list[int]] = {name: [] for name in turns}
        for step in range(150):
            name = rng.choice(list(turns))
            if turns[name] and rng.random() < 0.1:
                turns[name] -= 1
                tokens = [rng.randrange(30000) for _ in range(rng.randrange(5, 40))]
                said[name] += tokens
                engine.add(name, tokens, rng.randrange(1, 12), resumable=turns[name] > 0)
            elif rng.random() < 0.15 and said[name]:
                heard = said[name] + engine.outputs[name]
                engine.add(f"r{step}", (heard if rng.random() < 0.5 else said[name])[:120], rng.randrange(1, 20))
            if engine.scheduler.has_requests():
                engine.step()
            else:
                engine.update()
        for name, num_left in turns.items():
            if num_left:
                engine.add(name, [7], 1)
        engine.run(3000)
    except Exception as error:  # noqa: BLE001 -- whatever it is, it is told with the seed
        raised = place_of(error)
    return Lived((), raised, tuple(broken_in(engine)))


def survey(
    name: str, seeds: range, faults: frozenset[str], *, is_hybrid: bool, in_sessions: bool, loads_fail: bool = False
) -> Iterator[tuple[int, Lived, str]]:
    """(Seed, what became of its world, what is raised without a recorder)."""
    make = connectors()[name]
    for seed in seeds:
        if in_sessions:
            lived = live_sessions(seed, make(), is_recorded=True)
            yield seed, lived, live_sessions(seed, make(), is_recorded=False).raised if lived.raised else ""
            continue
        rng = random.Random(f"survey {seed}")
        settings: dict[str, Any] = {"fragile_steps": rng.random() < 0.5}
        if "simple" in name or name == "multi":
            settings["enable_prefix_caching"] = True  # without it the connector does nothing
        if name == "example":
            settings["enable_prefix_caching"] = False  # it writes over what is cached, and says so
        if is_hybrid:
            settings["windows"] = rng.choice(WINDOWS)
        inner = failing(make(), rng, settings) if loads_fail else make()
        lived = live(seed, inner, is_recorded=True, faults=faults, **settings)
        plain = live(seed, inner, is_recorded=False, faults=faults, **settings).raised if lived.raised else ""
        yield seed, lived, plain


def main() -> int:
    """Exit code 0 where every world ended well, 1 where one did not."""
    from sim.faults import CLIENT_FAULTS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connector", required=True, choices=sorted(connectors()))
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=100, help="how many worlds")
    parser.add_argument("--faults", nargs="*", default=[], help="beyond clients who go away and come all at once")
    parser.add_argument("--hybrid", action="store_true", help="models with sliding windows")
    parser.add_argument("--sessions", action="store_true", help="streaming sessions in the place of other clients")
    parser.add_argument("--failing-loads", action="store_true", help="another cache beside it, whose loads fail")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    counts: Counter[str] = Counter()
    faults = CLIENT_FAULTS | set(arguments.faults)
    kinds = {"is_hybrid": arguments.hybrid, "in_sessions": arguments.sessions}
    kinds["loads_fail"] = arguments.failing_loads
    for seed, lived, plain in survey(arguments.connector, seeds, faults, **kinds):
        counts[lived.kind.split(": ")[0]] += 1
        if lived.kind == "well":
            continue
        print(f"seed {seed} ({', '.join(lived.faults)}): {lived.raised or 'ended'}")
        if lived.raised:
            print(f"  without the recorder: {plain or 'ends well'}")
        for detail in lived.broken[:3]:
            print(f"  {detail}", flush=True)
    for kind, count in counts.most_common():
        print(f"{count:6d} {kind}")
    return int(counts.total() != counts["well"])


if __name__ == "__main__":
    sys.exit(main())
