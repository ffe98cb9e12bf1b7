"""What fits on a terminal: which columns of a table, how short an id. It must not know what stands in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rich.cells import cell_len

from kvledger.adapters.tools.logs.finding import CUT

_GAP: Final = 2
LEAST_PROSE: Final = 34
"""A column of text is folded, but not into a narrower one."""
_LEAST_OF_ID: Final = 8
_LEAST_CUT: Final = 4


def fitting(
    columns: Mapping[str, str],
    rows: Sequence[Sequence[str]],
    possible: Sequence[str],
    width: int | None,
    spare: Sequence[str],
) -> list[str]:
    """The columns that are shown: the possible ones but for those of `spare`, from its first on, that have no room."""
    shown = list(possible)
    for name in spare:
        if width is None or needed(columns, rows, shown) <= width:
            break
        if name in shown:
            shown.remove(name)
    return shown


def needed(columns: Mapping[str, str], rows: Sequence[Sequence[str]], shown: Sequence[str] | None = None) -> int:
    """How wide a table is at least: cells in one line, but for the last column where that is prose."""
    shown = list(columns) if shown is None else shown
    names = list(columns)
    widths = {name: max([_of_heading(name), *(cell_len(row[names.index(name)]) for row in rows)]) for name in shown}
    last = shown[-1]
    if columns[last] == "left":
        widths[last] = min(widths[last], LEAST_PROSE)
    return sum(widths.values()) + _GAP * (len(shown) - 1)


def _of_heading(name: str) -> int:
    """It is folded between words."""
    return max(map(len, name.split()), default=0)


def cut_short(ids: Iterable[str]) -> dict[str, str]:
    """Each id by its shortest beginning that no other one has, with a `…` for the rest."""
    names = sorted(set(ids))
    found = {}
    for place, name in enumerate(names):
        neighbours = (*names[max(0, place - 1) : place], *names[place + 1 : place + 2])
        length = max([_LEAST_OF_ID, *(_num_equal(name, other) + 1 for other in neighbours)])
        found[name] = name if length + _LEAST_CUT >= len(name) else f"{name[:length]}{CUT}"
    return found


def _num_equal(name: str, other: str) -> int:
    pairs = enumerate(zip(name, other, strict=False))
    return next((place for place, (mine, its) in pairs if mine != its), min(len(name), len(other)))
