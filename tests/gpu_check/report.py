"""What each part has found, and the report that is made of it.

A part cannot pass without having looked: one that checked nothing has failed.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs

from gpu_check.machine import Machine


class Lacking(Exception):
    """What this machine lacks; the part is skipped, with this as the reason."""


@attrs.frozen
class Found:
    """How many things were compared and found right, and what was measured."""

    num_checks: int
    figures: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class Part:
    """A name, what it shows, and the function that looks. One that finds something wrong raises."""

    name: str
    shows: str
    look: Callable[[Machine], Found]


@attrs.frozen
class PartReport:
    """How a part ended."""

    name: str
    shows: str
    outcome: Literal["ran", "skipped", "failed"]
    reason: str
    num_checks: int
    duration_s: float
    figures: dict[str, Any]


def run_parts(parts: Sequence[Part], machine: Machine, say: Callable[[str], None] = print) -> list[PartReport]:
    """Run them one after the other; what one finds keeps no other from running."""
    reports = []
    for part in parts:
        say(f"… {part.name}: {part.shows}")
        report = _run(part, machine)
        say(f"  {report.outcome} after {report.duration_s:.1f} s, {report.num_checks} checks. {report.reason}".rstrip())
        for name, value in report.figures.items():
            for line in value if isinstance(value, list) else [value]:
                say(f"    {name}: {line}")
        reports.append(report)
    return reports


def _run(part: Part, machine: Machine) -> PartReport:
    started = time.monotonic()
    found, outcome, reason = Found(0), "ran", ""
    try:
        found = part.look(machine)
    except Lacking as lacking:
        outcome, reason = "skipped", str(lacking)
    except Exception as error:  # noqa: BLE001 -- the other parts are to run all the same
        traceback.print_exc()
        outcome, reason = "failed", f"{type(error).__name__}: {error}"
    else:
        if not found.num_checks:
            outcome, reason = "failed", "it checked nothing"
    return PartReport(
        part.name, part.shows, outcome, reason, found.num_checks, time.monotonic() - started, found.figures
    )


def summary(reports: Sequence[PartReport]) -> str:
    """One line: how many parts ended in which way, and which did not run."""
    counts = {
        outcome: [report for report in reports if report.outcome == outcome] for outcome in ("ran", "failed", "skipped")
    }
    line = ", ".join(f"{len(some)} {outcome}" for outcome, some in counts.items())
    missing = [f"{report.name} ({report.reason})" for report in counts["failed"] + counts["skipped"]]
    return f"{line}{': ' if missing else ''}{'; '.join(missing)}"
