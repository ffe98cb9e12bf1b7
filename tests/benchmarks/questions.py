"""How fast a long log answers: the commands a person gives, each in a process of its own, as CPU time.

The first one builds the index, and is the anchor of the others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.figures import Cases, Figure, compared
from benchmarks.verify_speed import MIXES, seconds_of, serve

_FIRST = "show LOG, which builds the index"


def _measure(num_steps: int, num_rounds: int) -> Sequence[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        log, _ = serve(MIXES["a device pool too small"], Path(folder, "logs"), num_steps)
        request_id = "cmpl-benchmark-000300-0"
        path = str(log.path)
        rounds: dict[str, list[float]] = {}
        for number in range(num_rounds):
            environment = {"XDG_CACHE_HOME": str(Path(folder, f"cache-{number}"))}
            for name, command in {
                "--version": ["--version"],
                _FIRST: ["show", path],
                "show LOG": ["show", path],
                "show LOG REQUEST": ["show", path, request_id],
                "why LOG REQUEST": ["why", path, request_id],
            }.items():
                rounds.setdefault(name, []).append(seconds_of(*command, environment=environment).of_cpu)
        return [
            *compared("CPU time", "s", rounds, anchor=_FIRST),
            Figure("size of the log", _FIRST, log.total_bytes() / 1e6, "MB"),
        ]


def cases(*, full: bool) -> Cases:
    """A log of some minutes of serving under pressure, or of ten times as many."""
    num_steps = 20_000 if full else 2_000
    return {f"{num_steps:,} steps": partial(_measure, num_steps, 3)}
