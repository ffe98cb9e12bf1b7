"""`make torture`: kill thousands of writers, at changes of files and at random moments, and read what they left.

Exit code 0: nothing acknowledged was lost, nothing torn was read. 1: something was; the seed is printed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvledger.storage.events import Durability
from log_torture.kill_points import KillPoint, run_until_killed
from log_torture.verdict import check_log
from log_torture.writer import Plan, write

_MOMENTS = ("before", "middle", "after")


def random_plan(chance: random.Random) -> Plan:
    """Several durabilities, segments that hold one frame or many, with retention and without."""
    return Plan(
        durability=chance.choice([Durability.OS, Durability.DISK]),
        segment_bytes=chance.choice([1, 440, 1_000, 20_000]),
        num_appends=chance.choice([1, 10, 100, 400]),
        flush_every=chance.choice([1, 3, 10]),
        max_bytes=chance.choice([None, 3_000, 1 << 30]),
    )


def kill_once(directory: Path, chance: random.Random) -> str:
    """Let a writer work on a new log until it is killed, and check what it left; returns how it was killed."""
    plan = random_plan(chance)
    point, outside = KillPoint(), None
    if chance.random() < 0.5:
        point = KillPoint(int(chance.expovariate(1 / 60)), chance.choice(_MOMENTS))
    else:
        seconds = chance.expovariate(1 / 0.01)

        def outside(pid: int) -> None:
            time.sleep(seconds)
            os.kill(pid, signal.SIGKILL)

    shutil.rmtree(directory, ignore_errors=True)
    killed = run_until_killed(point, lambda acknowledge: write(directory, plan, acknowledge), outside)
    if directory.exists():
        check_log(directory, killed.last_acknowledged)
    if not killed.was_killed:
        return "came to its end"
    return f"killed {point.moment} a call" if outside is None else "killed at a moment"


def torture(seed: int, num_kills: int) -> int:
    """Returns how many kills went well; stops at the first that did not."""
    outcomes: Counter[str] = Counter()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvledger-torture-") as scratch:
        for number in range(num_kills):
            try:
                outcomes[kill_once(Path(scratch) / "log", random.Random(f"{seed}:{number}"))] += 1
            except Exception:  # noqa: BLE001 -- whatever it is, it is printed with the seed
                print(f"kill {number} of seed {seed} went wrong:\n{traceback.format_exc()}", file=sys.stderr)
                print(f"repeat it with: make torture SEED={seed} KILLS={number + 1}", file=sys.stderr)
                return number
            if (number + 1) % 250 == 0:
                print(f"{number + 1} of {num_kills} kills, {time.monotonic() - started:.0f} s", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    return num_kills


def main() -> int:
    """Run the torture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=None, help="repeats a run; default: another one each time")
    arguments = parser.parse_args()
    seed = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    return 0 if torture(seed, arguments.kills) == arguments.kills else 1


if __name__ == "__main__":
    sys.exit(main())
