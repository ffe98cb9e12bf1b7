"""`make sim`: many worlds with a progress bar, or one with its transcript."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rich.console import Console
from rich.progress import Progress

TOTALS = (
    "num_requests",
    "num_preemptions",
    "num_tokens_recovered",
    "num_tokens_retained",
    "num_tokens_recomputed",
    "num_chunks_evicted",
    "num_loads_failed",
)


def main() -> int:
    """Exit code 0 where every world ended well, 1 where one did not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many worlds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this world alone and print its transcript")
    arguments = parser.parse_args()
    console = Console()

    from sim.checks import CHECKS
    from sim.world import World

    def live(seed: int) -> tuple[World, str]:
        world = World(seed)
        try:
            world.run()
            for check in CHECKS:
                check(world)
        except Exception:  # noqa: BLE001 -- whatever it is, it is printed with the seed
            return world, traceback.format_exc()
        return world, ""

    if arguments.seed is not None:
        world, trouble = live(arguments.seed)
        world.side.ledger.commit()
        print(f"seed {world.seed}: {world.settings}")
        for sequence, event in world.events():
            print(f"{sequence:6d} {event}")
        print(trouble or "ended well")
        return 1 if trouble else 0

    totals = dict.fromkeys(TOTALS, 0)
    failed = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("worlds", total=arguments.seeds)
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            world, trouble = live(seed)
            if trouble:
                failed.append(seed)
                console.print(f"seed {seed}: {trouble.splitlines()[-1]}  (make sim SEED={seed})", style="red")
            for name in TOTALS:
                totals[name] += getattr(world.side.ledger.projections.totals.figures, name)
            progress.update(task, advance=1, description=f"worlds, {len(failed)} failed")
    for name, value in totals.items():
        console.print(f"{name.removeprefix('num_').replace('_', ' '):22s} {value:10,d}")
    console.print(f"{arguments.seeds - len(failed)} of {arguments.seeds} worlds ended well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
