"""`make bench`: kvledger beside what it is compared with, as ratios in one run, and what `kvledger verify` costs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rich.console import Console
from rich.progress import (
    Progress,
    track,  # noqa: F401 -- rich is loaded before vLLM takes over logging
)
from rich.table import Table

if TYPE_CHECKING:
    from benchmarks.scheduler_overhead import Field, Timing

BUDGET = 0.10


def main() -> int:
    """Run the benchmark; the exit code is 1 where the budget of the design is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256, help="decoding requests")
    parser.add_argument("--steps", type=int, default=1000, help="engine steps per contender")
    parser.add_argument("--arrivals", type=int, default=0, help="requests that arrive, and that end, in each step")
    parser.add_argument("--only", choices=("scheduler", "recorder", "verify"), help="one of the benchmarks")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each benchmark, instead of tables")
    arguments = parser.parse_args()

    chosen = {arguments.only} if arguments.only else {"scheduler", "recorder", "verify"}
    kept = "scheduler" not in chosen or _scheduler_overhead(arguments)
    if "recorder" in chosen:
        _recorder_overhead(arguments)
    if "verify" in chosen:
        kept = _verify_speed(as_json=arguments.json) and kept
    return 0 if kept else 1


def _verify_speed(*, as_json: bool) -> bool:
    from benchmarks import verify_speed
    from benchmarks.served_logs import MIXES

    speeds = list(verify_speed.measure_mixes(MIXES.values(), rounds=3, each_checker=True))
    if as_json:
        print(json.dumps({"verify": [attrs.asdict(speed) for speed in speeds]}))
    else:
        Console().print(verify_speed.table_of(speeds))
    slowest = min(speed.events_per_second for speed in speeds)
    return slowest >= verify_speed.BUDGET_EVENTS_PER_SECOND


def _measured(arguments: argparse.Namespace, make_field: Callable[[Path], Field]) -> list[Timing]:
    from benchmarks import scheduler_overhead

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("stepping schedulers", total=arguments.steps)
        return scheduler_overhead.measure(
            num_requests=arguments.requests,
            num_steps=arguments.steps,
            num_arrivals=arguments.arrivals,
            make_field=make_field,
            progress=lambda done, _all: progress.update(task, completed=done),
        )


def _asked(arguments: argparse.Namespace) -> dict[str, int]:
    return {"requests": arguments.requests, "arrivals": arguments.arrivals, "steps": arguments.steps}


def _title(arguments: argparse.Namespace) -> str:
    churn = f", {arguments.arrivals} arrivals and ends a step" if arguments.arrivals else ""
    return f"{arguments.requests} decoding requests{churn}, block 16, medians of {arguments.steps} steps"


def _recorder_overhead(arguments: argparse.Namespace) -> None:
    from benchmarks.scheduler_overhead import RECORDED, recorded_contenders

    timings = {timing.name: timing for timing in _measured(arguments, recorded_contenders)}
    pairs = [(timing, timings[RECORDED + name]) for name, timing in timings.items() if RECORDED + name in timings]
    if arguments.json:
        rows = [
            {
                "connector": alone.name,
                "alone_us": round(alone.schedule_us + alone.update_us, 1),
                "added": attrs.asdict(recorded.added_to(alone)),
                "log_bytes": round(recorded.log_bytes),
            }
            for alone, recorded in pairs
        ]
        print(json.dumps({"recorder": {**_asked(arguments), "rows": rows}}))
        return
    table = Table(title=_title(arguments))
    table.add_column("connector")
    for column in ("schedule() + update_from_output() µs, alone", "added by the recorder", "log B a step"):
        table.add_column(column, justify="right")
    for alone, recorded in pairs:
        alone_us = f"{alone.schedule_us + alone.update_us:.0f}"
        table.add_row(alone.name, alone_us, str(recorded.added_to(alone)), f"{recorded.log_bytes:.0f}")
    console = Console()
    console.print(table)
    console.print("of each turn of 20 steps the median, compared with that of the same connector alone; over all turns")
    console.print("the median, and in brackets the tenth and the ninetieth percentile")


def _scheduler_overhead(arguments: argparse.Namespace) -> bool:
    from benchmarks.scheduler_overhead import contenders

    timings = _measured(arguments, contenders)
    base = timings[0]
    rows = [
        {
            "connector": timing.name,
            "schedule_us": round(timing.schedule_us, 1),
            "schedule_added": round(timing.schedule_us / base.schedule_us - 1, 4),
            "update_us": round(timing.update_us, 1),
            "update_added": round(timing.update_us / base.update_us - 1, 4),
            "log_bytes": round(timing.log_bytes),
        }
        for timing in timings
    ]
    ours = next(row for row in rows if row["connector"] == "KVLedgerConnector")
    within = float(ours["schedule_added"]) <= BUDGET
    if arguments.json:
        print(json.dumps({**_asked(arguments), "rows": rows, "within": within}))
        return within
    table = Table(title=_title(arguments))
    for column in ("connector", "schedule() µs", "added", "update_from_output() µs", "added", "log B a step"):
        table.add_column(column, justify="left" if column == "connector" else "right")
    for row in rows:
        table.add_row(
            str(row["connector"]),
            f"{row['schedule_us']}",
            f"{float(row['schedule_added']):+.1%}",
            f"{row['update_us']}",
            f"{float(row['update_added']):+.1%}",
            str(row["log_bytes"]),
        )
    console = Console()
    console.print(table)
    console.print(f"budget: at most {BUDGET:.0%} of schedule(), {'kept' if within else 'MISSED'}")
    return within


if __name__ == "__main__":
    sys.exit(main())
