"""`make sim`: many worlds with a progress bar and their figures, or one with its transcript."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console
from rich.progress import Progress

if TYPE_CHECKING:
    from sim.world import World

TOTALS = (
    "num_requests",
    "num_preemptions",
    "num_tokens_recovered",
    "num_tokens_retained",
    "num_tokens_recomputed",
    "num_chunks_evicted",
    "num_loads_failed",
    "num_saves_failed",
)


def live(seed: int) -> tuple[World | None, str]:
    """Let a world live and check it; returns it and what went wrong, closed."""
    from sim.checks import CHECKS
    from sim.world import World

    world = None
    try:
        with World(seed) as world:
            world.run()
            for check in CHECKS:
                check(world)
    except Exception:  # noqa: BLE001 -- whatever it is, it is printed with the seed
        return world, traceback.format_exc()
    return world, ""


def transcript(seed: int) -> bool:
    """Print one world: settings, faults, what they did, and the events of its logs; returns whether it ended well."""
    from sim.logs import read_end
    from sim.world import World

    world, trouble = live(seed)
    print(f"seed {seed}")
    if isinstance(world, World):
        print(f"settings: {world.settings}")
        print(f"faults: {', '.join(world.fault_names) or 'none'}")
        for step, note in world.notes:
            print(f"step {step:5d} {note}")
        final = getattr(world, "log", None)
        if final is None and world.log_dir is None:
            world.side.ledger.commit()
            final = read_end(world.side)
        for number, log in enumerate([*world.dead_logs, *([] if final is None else [final])], 1):
            print(f"log of engine {number}")
            for sequence, event in log.events:
                print(f"{sequence:6d} {event}")
    print(trouble or "ended well")
    return not trouble


def simulate(seeds: range, console: Console) -> bool:
    """Let all worlds live; returns whether they ended well."""
    totals: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    failed = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("worlds", total=len(seeds))
        for seed in seeds:
            world, trouble = live(seed)
            if trouble:
                failed.append(seed)
                console.print(f"seed {seed}: {trouble.splitlines()[-1]}  (make sim SEED={seed})", style="red")
            if world is not None:
                figures = world.side.journal.totals.figures
                totals.update({name: getattr(figures, name) for name in TOTALS})
                totals.update(pages_checked=world.pages.num_pages_checked, restarts=len(world.dead_logs))
                totals.update(lost=world.meter.num_tokens_lost, again=world.meter.num_tokens_recomputed)
                faults.update(world.fault_names)
            progress.update(task, advance=1, description=f"worlds, {len(failed)} failed")
    for name, value in totals.items():
        if name not in ("lost", "again"):
            console.print(f"{name.removeprefix('num_').replace('_', ' '):22s} {value:10,d}")
    console.print("worlds with: " + ", ".join(f"{name} {count}" for name, count in sorted(faults.items())))
    share = 100 * totals["again"] / max(1, totals["lost"])
    console.print(f"of {totals['lost']:,d} tokens lost to preemptions {share:.1f} % were computed again")
    console.print(f"{len(seeds) - len(failed)} of {len(seeds)} worlds ended well")
    return not failed


def compare(seeds: range, console: Console) -> None:
    """Print what preemptions cost with kvledger, without a connector, and with vLLM's OffloadingConnector."""
    from sim.connectors import COMPARED
    from sim.shares import measure

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("worlds, three times each", total=len(seeds) * len(COMPARED))
        rows = measure(seeds, advance=lambda: progress.update(task, advance=1))
    console.print(f"{'':22s} {'preemptions':>12s} {'tokens lost':>12s} {'computed again':>15s} {'share':>8s}")
    for row in rows:
        console.print(row.title)
        for name, meter in row.meters.items():
            again = f"{meter.num_tokens_recomputed:15,d} {100 * meter.share_recomputed:7.1f}%"
            console.print(f"  {name:20s} {meter.num_preemptions:12,d} {meter.num_tokens_lost:12,d} {again}")


def main() -> int:
    """Exit code 0 where every world ended well, 1 where one did not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many worlds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this world alone and print its transcript")
    parser.add_argument("--compare", action="store_true", help="let other connectors live these worlds, too")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # faults make the connector speak, and rightly so
    console = Console()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    if arguments.seed is not None:
        return 0 if transcript(arguments.seed) else 1
    if arguments.compare:
        compare(seeds, console)
        return 0
    return 0 if simulate(seeds, console) else 1


if __name__ == "__main__":
    sys.exit(main())
