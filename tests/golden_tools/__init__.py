"""Golden logs: for each tool a log and the output that follows from it, derived from the log and not from the tool.

Tools share code, so they share its mistakes, and comparing two tools shows nothing. `stories/` describes what happened,
in words of the domain. A module for each tool holds the lines, records, rows or spans that follow. A comment derives
each figure that is not obvious. If a tool's output differs, find out which of the two is wrong. Never copy the output.
"""

from __future__ import annotations

from collections.abc import Mapping

from golden_tools import (
    export_page,
    export_perfetto,
    export_spans,
    show,
    state,
    stats,
    tables,
    top,
    verify,
    why,
)
from golden_tools.golden import Golden

__all__ = ["GOLDEN", "TELLS_NOTHING_OF_LIVES"]

GOLDEN: Mapping[str, Golden] = {
    **show.GOLDEN,
    **why.GOLDEN,
    **stats.GOLDEN,
    **verify.GOLDEN,
    **state.GOLDEN,
    **tables.GOLDEN,
    **top.GOLDEN,
    **export_perfetto.GOLDEN,
    **export_spans.GOLDEN,
    **export_page.GOLDEN,
}
"""Name → one way to ask a tool."""

TELLS_NOTHING_OF_LIVES: Mapping[str, str] = {
    "ls": "counts arrivals in the bytes of a log, and follows no request",
    "core": "shows what a log was written with, not what happened",
    "ship": "copies frames as they are",
    "repro": "has a scheduler of its own (docs/decisions/0066-one-reader-for-every-log.md)",
    "conformance": "reads no log but its own",
    "check": "reads no log",
    "retire": "deletes segments, whatever is in them",
    "completion": "prints a script",
}
"""Command → why it has no golden log."""
