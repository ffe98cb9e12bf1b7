"""`make fuzz`: change logs in thousands of ways, read them with every command, and look at the exit codes.

Exit code 0: each command ended as it says, within the memory and the time that the size of the log allows. 1: one did
not; what was changed, the command and the line that repeats the case are printed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from log_fuzz.fuzz import Failure, Fuzz, kept
from log_fuzz.seeds import served, told

MAX_SHOWN = 40
KEPT = Path("build/log_fuzz")


def fuzz(
    seed: int, numbers: range, *, with_engines: bool, every_line: bool = False, only_snapshots: bool = False
) -> list[Failure]:
    """Run these cases, print each failure once, and return them all."""
    found: list[Failure] = []
    by_place: Counter[str] = Counter()
    started, also = time.monotonic(), " --snapshots" if only_snapshots else ""
    with tempfile.TemporaryDirectory(prefix="kvledger-fuzz-") as scratch:
        logs = [*told(), *(served() if with_engines else ())]
        runner = Fuzz(logs, Path(scratch), only_snapshots=only_snapshots)
        print(f"{len(logs)} logs, {runner.num_spots} integers, {len(numbers)} cases", flush=True)
        for number in numbers:
            for failure in runner.run(runner.case(seed, number), every_line=every_line):
                place = f"{failure.ended.line.command}: {failure.ended.exit_code}: {failure.ended.reason}"
                by_place[place] += 1
                found.append(failure)
                if by_place[place] == 1 and len(by_place) <= MAX_SHOWN:
                    print(f"{failure}\n    kept at {kept(failure, KEPT)}", flush=True)
                    print(f"    repeat it with: make fuzz SEED={seed} ARGS='--case {number}{also}'", flush=True)
            if (number + 1) % 250 == 0:
                print(f"{number + 1} cases, {len(found)} failures, {time.monotonic() - started:.0f} s", flush=True)
    for place, count in by_place.most_common():
        print(f"{count:6d} {place}")
    return found


def main() -> int:
    """Run the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=None, help="repeats a run; default: another one each time")
    parser.add_argument("--snapshots", action="store_true", help="change nothing but the states of snapshots")
    parser.add_argument("--case", type=int, default=None, help="this one only, with every command")
    parser.add_argument(
        "--no-engines", action="store_true", help="leave out logs of simulated engines, which need vLLM"
    )
    arguments = parser.parse_args()
    seed = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    os.environ.pop("KVLEDGER_LOG", None)
    only = arguments.case
    numbers = range(arguments.cases) if only is None else range(only, only + 1)
    found = fuzz(
        seed,
        numbers,
        with_engines=not (arguments.no_engines or arguments.snapshots),
        every_line=only is not None,
        only_snapshots=arguments.snapshots,
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
