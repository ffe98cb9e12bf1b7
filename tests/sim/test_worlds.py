"""Some hundred worlds on vLLM's real scheduler; `make sim SEEDS=10000` runs more of them."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from processes import finished

from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.lab.simulation.hashed_model import BLOCK_SIZE, block_bytes
from sim.checks import CHECKS
from sim.faults import FAULTS
from sim.run import transcript
from sim.world import World

pytestmark = pytest.mark.scheduler

RUN = Path(__file__).with_name("run.py")
NUM_WORLDS = 300
NUM_SHORT = 60
NUM_WATCHED = 30
FOUND = (301460, 302512, 303897, 304710, 401701, 503010)
"""Seeds in which something was found once."""


def live(seed: int) -> World:
    """Live through a world and check what must hold after every one."""
    print(f"reproduce with: make sim SEED={seed}")
    with World(seed) as world:
        world.run()
        for check in CHECKS:
            check(world)
    return world


@pytest.mark.parametrize(
    "seed",
    [
        *range(NUM_WATCHED, NUM_SHORT),
        *FOUND,
        *(pytest.param(seed, marks=pytest.mark.long) for seed in range(NUM_SHORT, NUM_WORLDS)),
    ],
)
def test_a_world_ends_well(seed: int) -> None:
    """Whatever goes wrong: right KV in every copy and every read, all tokens, a log that replays and audits."""
    live(seed)


def test_the_first_worlds_end_well_and_meet_what_they_are_for() -> None:
    """A simulation in which nothing was preempted or recovered, or in which a fault never acts, would prove nothing."""
    met: Counter[str] = Counter()
    for seed in range(NUM_WATCHED):
        world = live(seed)
        figures = world.side.journal.totals.figures
        met["preemptions"] += figures.num_preemptions
        met["tokens recovered"] += figures.num_tokens_recovered
        met["chunks evicted"] += figures.num_chunks_evicted
        met["loads failed"] += figures.num_loads_failed
        met["pages checked"] += world.pages.num_pages_checked
        if world.subscriber is not None:
            met["blocks published"] += world.subscriber.num_stored
            met["blocks published as removed"] += world.subscriber.num_removed
        met["events lost to a full disk"] += world.log.num_events_lost
        met["logs of killed engines"] += len(world.dead_logs)
        met.update({note.partition(":")[0] for _, note in world.notes})
    wanted = {
        "preemptions": 150,
        "tokens recovered": 2000,
        "chunks evicted": 200,
        "loads failed": 3,
        "pages checked": 8_000,
        "blocks published": 300,
        "blocks published as removed": 150,
        "events lost to a full disk": 1,
        "logs of killed engines": 3,
        **{fault.name: 1 for fault in FAULTS},
    }
    too_few = {name: met[name] for name, count in wanted.items() if met[name] < count}
    assert not too_few


@pytest.mark.parametrize(
    "seed", [3, pytest.param(18, marks=pytest.mark.long), pytest.param(10034, marks=pytest.mark.long)]
)
def test_a_seed_decides_everything(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """In any process, whatever order Python gives to its sets: the same faults, the same events, times included."""
    assert transcript(seed)
    here = capsys.readouterr().out
    other_order = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"}
    process = finished([sys.executable, RUN, "--seed", str(seed)], env=other_order)
    assert process.returncode == 0, process.stdout + process.stderr
    # A note names the log before by its directory, which says when it was opened, and by which process.
    lines, others = ([ln for ln in out.splitlines() if "LogNote(" not in ln] for out in (here, process.stdout))
    assert len(lines) > 100
    assert lines == others


def test_vllm_never_schedules_a_prompt_that_its_pool_cannot_hold() -> None:
    """Why no world draws one: 0.32 keeps it at the head of the queue, with everybody else behind it, for ever.

    vLLM's start refuses a model length beyond the pool, and its front end prompts beyond the model length.
    """
    engine = SimulatedEngine(num_blocks=8, max_model_len=1024, chunk_size=16, host_bytes=block_bytes(BLOCK_SIZE) * 8)
    engine.add("too long", range(200), 4)
    engine.add("behind it", range(10), 4)
    for _ in range(20):
        engine.step()
    assert engine.scheduler.get_request_counts() == (0, 2)
    assert engine.outputs == {"too long": [], "behind it": []}
