"""Serves the same requests without a connector and with kvledger, and compares the two runs."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import attrs
from rich.console import Console

from kvledger.adapters.figures import Figures
from kvledger.adapters.lab.demo.engine import ENVIRONMENT, running_engine
from kvledger.adapters.lab.demo.model import make_model
from kvledger.adapters.lab.demo.recompute_counter import RecomputeCounter
from kvledger.adapters.lab.demo.workload import Workload
from kvledger.adapters.tools.cli.main import main as kvledger
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.totals import LogTotals
from kvledger.lifecycle import __version__
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Model, Reader
from kvledger.storage.extras import CONNECTOR, require

DIRECTORY = Path("build/demo")


def main() -> int:
    """Run the demo and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvledger.adapters.lab.demo", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts (default: %(default)s)")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="output directory (default: %(default)s)")
    arguments = parser.parse_args()
    progress = Console(stderr=True, highlight=False)
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", **ENVIRONMENT, **os.environ}
    try:
        require("the demo", *CONNECTOR)
    except ModuleNotFoundError as error:
        failures = [str(error)]
    else:
        failures = _run(Workload(seed=arguments.seed), arguments.directory, progress)
    for reason in failures:
        progress.print(f"demo failed: {reason}", style="red", markup=False, soft_wrap=True)
    return 1 if failures else 0


def _run(workload: Workload, directory: Path, progress: Console) -> list[str]:
    model, log_dir = directory / "model", directory / "logs"
    shutil.rmtree(log_dir, ignore_errors=True)
    progress.print(
        f"{workload.num_requests} requests and {workload.num_blocks} KV blocks of {workload.block_size} tokens: too "
        "few for all requests, so vLLM preempts some.\n"
        "Prefix caching is off, so only the connector can restore computed tokens, from host memory.",
        soft_wrap=True,
    )
    make_model(model)
    progress.print("running without a connector …")
    with running_engine(model, workload) as engine:
        plain, plain_outputs = engine.counter, engine.generate(workload.prompts(), workload.max_tokens)
    progress.print("running with kvledger …")
    with running_engine(model, workload, log_dir.absolute()) as engine:
        ours, outputs = engine.counter, engine.generate(workload.prompts(), workload.max_tokens)
    (log_path,) = log_dir.iterdir()
    logged, request_to_show = _read(log_path)
    # Flushed, so that the lines stay in order if both streams go to one place.
    if request_to_show:
        print("\nTimeline of a preempted request", flush=True)
        kvledger(["show", str(log_path), request_to_show])
    print("\nCheck of the whole log", flush=True)
    verify_exit_code = kvledger(["verify", str(log_path)])
    are_equal = outputs == plain_outputs
    failures = failures_of(logged, ours, outputs_equal=are_equal, verify_exit_code=verify_exit_code)
    counts = attrs.filters.include(int)
    report = {
        "failures": failures,
        "kvledger_version": __version__,
        "outputs_equal": are_equal,
        "verify_exit_code": verify_exit_code,
        "log_path": str(log_path),
        "with_connector": attrs.asdict(ours, filter=counts),
        "without_connector": attrs.asdict(plain, filter=counts),
        "logged": attrs.asdict(logged),
        "workload": attrs.asdict(workload),
    }
    report_path = directory / "report.json"
    report_path.write_text(json.dumps(report, indent=2) + "\n")
    print(
        f"""
Tokens after {logged.num_preemptions} preemptions (from the log)
  recovered    {logged.num_tokens_recovered:>6}  copied back from host memory
  retained     {logged.num_tokens_retained:>6}  still in vLLM's own prefix cache
  recomputed   {logged.num_tokens_recomputed:>6}  computed before a preemption and again after it

Measured at vLLM's scheduler, not from the log    no connector   kvledger
  preemptions                                     {plain.num_preemptions:>12} {ours.num_preemptions:>10}
  tokens that lost their blocks                   {plain.num_tokens_lost:>12} {ours.num_tokens_lost:>10}
  tokens computed a second time                   {plain.num_tokens_recomputed:>12} {ours.num_tokens_recomputed:>10}
  outputs                                         {"equal" if are_equal else "DIFFERENT":>23}

More
  .venv/bin/kvledger why {log_path} {request_to_show}
  .venv/bin/kvledger show {log_path}
  .venv/bin/kvledger verify {log_path}
  .venv/bin/kvledger stats {log_path}
  {report_path}   these figures as JSON""",
        flush=True,
    )
    return failures


def _read(log_path: Path) -> tuple[Figures, str]:
    """Return a log's figures, and the id of the request with the most settled tokens at a preemption; "" if none."""
    log = open_log(log_path)
    model = Model(log.core.tables, log.configuration)
    totals = LogTotals(model)
    reader = Reader(model, [totals])
    most_settled, request_id = -1, ""
    for frame in log.trusted_frames():
        events = list(frame)
        reader.take(events)
        for _, event in events:
            if isinstance(event, e.RequestPreempted) and event.num_settled_tokens > most_settled:
                most_settled, request_id = event.num_settled_tokens, event.request_id
    return totals.figures, request_id


def failures_of(
    logged: Figures, measured: RecomputeCounter, *, outputs_equal: bool, verify_exit_code: int
) -> list[str]:
    """Return why the demo failed: nothing was recovered, or a result is wrong. Empty if the demo succeeded."""
    found = []
    if not logged.num_preemptions:
        found.append("no request was preempted: the pool of KV blocks was large enough for all requests")
    elif not logged.num_tokens_recovered:
        found.append(f"no token was recovered after {logged.num_preemptions} preemptions; see `kvledger show`")
    if not outputs_equal:
        found.append("the outputs differ from the outputs without a connector, so wrong KV was read")
    if verify_exit_code:
        found.append(f"`kvledger verify` exited with {verify_exit_code}; see its output above")
    for name in ("num_preemptions", "num_tokens_recomputed"):
        in_log, seen = getattr(logged, name), getattr(measured, name)
        if in_log != seen:
            found.append(f"{name} is {in_log} in the log, but {seen} at vLLM's scheduler")
    return found


if __name__ == "__main__":
    sys.exit(main())
