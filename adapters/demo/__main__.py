"""`python -m kvledger.adapters.demo`: the same requests twice, without a connector and with ours, and what differs."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from kvledger.adapters.cli.main import main as kvledger
from kvledger.adapters.demo.child import EngineFailed, run_engine
from kvledger.adapters.demo.engine import EngineJob
from kvledger.adapters.demo.report import EngineFigures, LoggedRun, Report
from kvledger.adapters.demo.workload import Workload, connector
from kvledger.lifecycle import Figures
from kvledger.storage.extras import CONNECTOR, require

DIRECTORY = Path("build/demo")
INTERRUPTED = 130


def main() -> int:
    """Run the demo; returns the exit code."""
    arguments = _arguments()
    progress = Console(stderr=True, highlight=False)
    try:
        require("the demo", *CONNECTOR)
    except ModuleNotFoundError as error:
        _fail(progress, str(error))
        return 1
    results = sys.stderr if arguments.json else sys.stdout
    signal.signal(signal.SIGTERM, _interrupt)
    directory: Path = arguments.directory
    log_dir = directory / "logs"
    if not arguments.keep:
        shutil.rmtree(log_dir, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.redirect_stdout(results):
            report = _run(Workload(seed=arguments.seed), directory, log_dir, progress)
    except EngineFailed as failure:
        _fail(progress, str(failure))
        return 1
    except KeyboardInterrupt:
        progress.print("interrupted; no process is left behind")
        return INTERRUPTED
    report_path = directory / "report.json"
    report_path.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    if arguments.json:
        print(report_path.read_text(), end="")
    for reason in report.failures():
        _fail(progress, reason)
    return 1 if report.failures() else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvledger.adapters.demo", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the report to stdout, everything else to stderr")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the logs of earlier demos")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="where to write (default: %(default)s)")
    return parser.parse_args()


def _fail(progress: Console, reason: str) -> None:
    progress.print(f"demo failed: {reason}", style="red", markup=False, soft_wrap=True)


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _run(workload: Workload, directory: Path, log_dir: Path, progress: Console) -> Report:
    started = time.monotonic()
    progress.print(
        f"{workload.num_requests} requests and {workload.num_blocks} KV blocks of {workload.block_size} tokens: too "
        "few for all, so vLLM takes blocks away from some.\n"
        "Prefix caching is off: what comes back can only come from the connector's host memory.",
        soft_wrap=True,
    )
    plain = _serve("without connector", workload, directory, None, progress)
    transfer = connector(log_dir.absolute(), chunk_size=workload.chunk_size, host_bytes="64MiB")
    ours = _serve("with kvledger", workload, directory, transfer, progress)
    log_path = Path(ours["log_path"])
    logged = LoggedRun.read(log_path)
    # Flushed, so that the words stay in order where both streams go to one place.
    if logged.request_to_show:
        print("\nTimeline of a preempted request", flush=True)
        kvledger(["show", str(log_path), logged.request_to_show])
    print("\nThe whole log, checked", flush=True)
    verify_exit_code = kvledger(["verify", str(log_path)])
    report = Report(
        workload=workload,
        vllm_version=ours["vllm_version"],
        log_path=str(log_path),
        outputs_equal=ours["outputs"] == plain["outputs"],
        verify_exit_code=verify_exit_code,
        logged=logged.figures,
        with_connector=EngineFigures.from_result(ours),
        without_connector=EngineFigures.from_result(plain),
        duration_s=time.monotonic() - started,
    )
    _summarize(report, directory)
    return report


def _serve(
    name: str, workload: Workload, directory: Path, transfer: dict[str, Any] | None, progress: Console
) -> dict[str, Any]:
    job = EngineJob(str((directory / "model").absolute()), transfer, workload)
    chatter = directory / f"vllm-{name.replace(' ', '-')}.log"
    return run_engine(job, chatter, lambda text: progress.print(f"{name}: {text}", markup=False, soft_wrap=True))


def _summarize(report: Report, directory: Path) -> None:
    figures: Figures = report.logged
    ours, plain = report.with_connector, report.without_connector
    print(
        f"""
What came back after {figures.num_preemptions} preemptions, in tokens (from the log)
  recovered    {figures.num_tokens_recovered:>6}  copied back from host memory
  retained     {figures.num_tokens_retained:>6}  still in vLLM's own prefix cache
  recomputed   {figures.num_tokens_recomputed:>6}  computed before a preemption and again after it

Measured at vLLM's scheduler, not from the log    no connector   kvledger
  preemptions                                     {plain.num_preemptions:>12} {ours.num_preemptions:>10}
  tokens that lost their blocks                   {plain.num_tokens_lost:>12} {ours.num_tokens_lost:>10}
  tokens computed a second time                   {plain.num_tokens_recomputed:>12} {ours.num_tokens_recomputed:>10}
  outputs                                         {"equal" if report.outputs_equal else "DIFFERENT":>23}
Generation took {plain.duration_s:.1f} s without and {ours.duration_s:.1f} s with kvledger. That says nothing of speed:
with a model this small, computing a token again costs no more than fetching it.

Look further
  .venv/bin/kvledger show {report.log_path}
  .venv/bin/kvledger verify {report.log_path}
  .venv/bin/kvledger replay {report.log_path}
  {directory / "report.json"}   these figures for programs
  {directory}/vllm-*.log   what vLLM said""",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
