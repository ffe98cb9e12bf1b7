"""A case of a benchmark as it was run, stored as JSON."""

from __future__ import annotations

from pathlib import Path

import attrs
import msgspec
from benchmarks.figures import Figure


@attrs.frozen
class Result:
    """One case of a benchmark, as it was run."""

    case: str
    figures: tuple[Figure, ...]
    command: str
    date: str
    commit: str
    machine: str
    minutes: float


def stored(path: Path) -> list[Result]:
    """What `store` wrote; nothing where there is no such file."""
    return msgspec.json.decode(path.read_bytes(), type=list[Result]) if path.exists() else []


def store(path: Path, result: Result) -> None:
    """Put a case's result in the place of its last one."""
    by_case = {each.case: each for each in stored(path)} | {result.case: result}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(list(by_case.values())), indent=1) + b"\n")
