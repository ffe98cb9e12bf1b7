"""`make bench`: kvledger beside what it is compared with. Each figure stands beside its anchor in the same run.

    python tests/benchmarks/run.py                            every benchmark, its short form
    python tests/benchmarks/run.py scheduler --full           all cases of one
    python tests/benchmarks/run.py scheduler --case steady    cases whose names contain a text
    python tests/benchmarks/run.py scheduler --against PATH   another checkout (with its .venv), in turns with this one
    python tests/benchmarks/run.py trace --trace FILE         serve a production trace (--requests 50: the first ones)
    python tests/benchmarks/run.py pool-sizes --trace FILE    compare what `stats` says of other pools with such pools
    python tests/benchmarks/run.py --page                     write what is stored into docs/benchmarks.md

Results are stored as JSON under build/bench/. Progress goes to stderr. No figure decides the exit code.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve()
REPOSITORY = _HERE.parents[2]
sys.path.insert(0, str(_HERE.parents[1]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks import page  # noqa: E402 -- found by the path set above
from benchmarks.figures import CannotMeasure, Cases, Figure, Spread  # noqa: E402
from benchmarks.results import Result, store, stored  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

BENCHMARKS = {
    "scheduler": "scheduler_overhead",
    "full-pool": "full_pool",
    "recorder": "recorder_overhead",
    "serving": "serving",
    "verify": "verify_speed",
    "questions": "questions",
    "copies": "copy_bandwidth",
    "digests": "page_digests",
    "memory": "tracker_memory",
    "shipping": "shipping",
    "trace": "trace_replay",
    "pool-sizes": "pool_sizes",
}
"""Name -> module, each with `cases(full=...)`."""
NEED_TRACE = frozenset({"trace", "pool-sizes"})
"""Those that need a file of the user's."""
_PAGE = REPOSITORY / "docs" / "benchmarks.md"
_progress = Console(stderr=True, highlight=False)


def main() -> int:
    """Run what is asked for; the exit code is 1 where something could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(BENCHMARKS)}; all of them by default, {', '.join(sorted(NEED_TRACE))} only with a FILE",
    )
    parser.add_argument("--full", action="store_true", help="all cases, more rounds")
    parser.add_argument("--case", default="", help="only cases whose names contain this")
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--rounds", type=int, help="of serving; with --against: turns of the two checkouts (default 3)")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="a trace in Mooncake's format, see docs/benchmarks.md"
    )
    parser.add_argument("--requests", type=int, help="the first of the trace; by default 2,500, of pool-sizes 1,500")
    parser.add_argument("--results", type=Path, default=REPOSITORY / "build" / "bench", help="where JSON is stored")
    parser.add_argument("--page", action="store_true", help="only write docs/benchmarks.md from what is stored")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(BENCHMARKS):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    if arguments.requests is not None and arguments.requests < 1:
        parser.error(f"--requests is {arguments.requests}; it must be at least 1")
    if arguments.page:
        print("written:", *page.write(_PAGE, arguments.results, arguments.names or BENCHMARKS))
        return 0
    is_complete = True
    for name in arguments.names or [name for name in BENCHMARKS if name not in NEED_TRACE or arguments.trace]:
        try:
            if arguments.against:
                _compare(name, arguments)
            else:
                for result in _measure(name, arguments):
                    store(arguments.results / f"{name}.json", result)
                    _show(name, result.case, result.figures)
        except CannotMeasure as reason:
            _progress.print(f"{name}: not measured: {reason}", soft_wrap=True)
            is_complete = False
    return 0 if is_complete else 1


def _measure(name: str, arguments: argparse.Namespace) -> Iterator[Result]:
    options = ["--full"] if arguments.full else []
    settings: dict[str, Any] = {}
    if name == "serving" and arguments.rounds:
        settings["num_rounds"] = arguments.rounds
        options += ["--rounds", str(arguments.rounds)]
    if name in NEED_TRACE:
        settings["trace"] = arguments.trace
        if arguments.requests:
            settings["num_requests"] = arguments.requests
        options += _trace_options(arguments, shown=True)
    cases: Cases = importlib.import_module(f"benchmarks.{BENCHMARKS[name]}").cases(full=arguments.full, **settings)
    chosen = {case: measure for case, measure in cases.items() if arguments.case in case}
    if not chosen:
        raise CannotMeasure(f"none of its cases contains {arguments.case!r}: {', '.join(cases)}")
    for number, (case, measure) in enumerate(chosen.items(), 1):
        _progress.print(f"{name} {number}/{len(chosen)}: {case} ...")
        began = time.monotonic()
        figures = tuple(measure())
        yield Result(
            case,
            figures,
            " ".join(["python tests/benchmarks/run.py", name, *options]),
            dt.datetime.now(dt.UTC).date().isoformat(),
            _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else ""),
            f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
            round((time.monotonic() - began) / 60, 1),
        )


def _trace_options(arguments: argparse.Namespace, *, shown: bool) -> list[str]:
    """`shown` in results, the file has no folder: it lies elsewhere on every machine."""
    options = []
    if arguments.trace:
        options += ["--trace", arguments.trace.name if shown else str(arguments.trace)]
    if arguments.requests:
        options += ["--requests", str(arguments.requests)]
    return options


def _compare(name: str, arguments: argparse.Namespace) -> None:
    """Both checkouts with the benchmarks of this one, a process each, in turns."""
    rounds: dict[tuple[str, str, str], tuple[list[float], list[float]]] = {}
    options = [*(["--full"] if arguments.full else []), "--case", arguments.case]
    if name in NEED_TRACE:
        options += _trace_options(arguments, shown=False)
    with tempfile.TemporaryDirectory() as folder:
        num_turns = arguments.rounds or 3
        for turn in range(num_turns):
            for side, checkout in enumerate((REPOSITORY, arguments.against.resolve())):
                _progress.print(f"{name} round {turn + 1}/{num_turns}: {checkout}")
                python = checkout / ".venv" / "bin" / "python"
                results = Path(folder) / f"{turn}-{side}"
                command = [python, _HERE, name, *options, "--results", results]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                for case in stored(results / f"{name}.json"):
                    for figure in case.figures:
                        value = figure.ratio.median if figure.ratio else figure.value
                        rounds.setdefault((case.case, figure.what, figure.contender), ([], []))[side].append(value)
    table = Table(title=f"{name}: this checkout, {arguments.against}, and the ratio of the two")
    for column in ("case", "measured", "contender", "here", "there", "here / there"):
        table.add_column(column)
    for (case, what, contender), (here, there) in rounds.items():
        ratio = Spread.of([mine / its for mine, its in zip(here, there, strict=True) if its] or [1.0])
        table.add_row(case, what, contender, str(Spread.of(here)), str(Spread.of(there)), str(ratio))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _show(name: str, case: str, figures: Sequence[Figure]) -> None:
    columns, rows = page.grid(figures)
    table = Table(*columns, title=f"{name}: {case}", title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
