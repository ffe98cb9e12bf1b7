"""Writes the figures into docs/benchmarks.md: a table and plots for each block that is marked there.

A block is what stands between `<!-- figures: NAME; plot: WHAT, WHAT -->` and `<!-- end of figures -->`; NAME is a
benchmark whose results are stored. Prose around blocks is written by hand, and a block without results stays.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from benchmarks import plot
from benchmarks.figures import Figure
from benchmarks.results import Result, stored

_BLOCK = re.compile(
    r"(<!-- figures: (?P<name>[\w-]+)(?:; plot: (?P<plots>[^\n]+?))? -->\n).*?(<!-- end of figures -->)", re.DOTALL
)


def write(page: Path, results: Path, names: Collection[str]) -> list[str]:
    """Rewrite these blocks of `page` from `results`/NAME.json, plots beside it; returns the names of those written."""
    written = []

    def block(found: re.Match[str]) -> str:
        name = found["name"]
        cases = stored(results / f"{name}.json") if name in names else []
        if not cases:
            return found[0]
        written.append(name)
        images = []
        for what in filter(None, re.split(", *", found["plots"] or "")):
            image = page.parent / page.stem / f"{name}-{re.sub('[^a-z0-9]+', '-', what.lower()).strip('-')}.svg"
            image.parent.mkdir(exist_ok=True)
            image.write_text(plot.bars(what, cases))
            images += [f"![{what}, as ratios]({page.stem}/{image.name})", ""]
        return found[1] + "\n".join(["", *_origin(cases), "", *_tables(cases), "", *images, ""]) + found[4]

    text = _BLOCK.sub(block, page.read_text())
    page.write_text(text)
    return written


def _origin(cases: Sequence[Result]) -> list[str]:
    """Where the figures come from, a line for each run."""
    runs = dict.fromkeys((case.date, case.commit, case.command, case.machine) for case in cases)
    return [f"`{command}`, {date}, commit {commit}, {machine}.  " for date, commit, command, machine in runs]


def grid(figures: Sequence[Figure]) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of a table: a row for each contender, a column for each thing measured.

    A cell has the ratio where there is one; what a quantity is in itself says the anchor's row. The head of a column
    names the anchor if all ratios of the column have the same one.
    """
    columns = list(dict.fromkeys(figure.what for figure in figures))
    heads = [
        _head(what, {figure.anchor for figure in figures if figure.what == what and figure.ratio}) for what in columns
    ]
    cells = {(figure.contender, figure.what): _cell(figure) for figure in figures}
    contenders = dict.fromkeys(figure.contender for figure in figures)
    return ["", *heads], [[name, *(cells.get((name, what), "") for what in columns)] for name in contenders]


def _head(what: str, anchors: Collection[str]) -> str:
    """The head of a column. Some names contain the anchor already."""
    anchor = next(iter(anchors), "")
    return f"{what} (× {anchor})" if len(anchors) == 1 and anchor not in what else what


def _tables(cases: Sequence[Result]) -> list[str]:
    """One table for all cases that measure the same."""
    lines: list[str] = []
    last: list[str] = []
    for case in cases:
        columns, rows = grid(case.figures)
        if columns != last:
            lines += ["", _row("case", "contender", *columns[1:]), _row("---", "---", *["---:"] * (len(columns) - 1))]
            last = columns
        lines += [_row(case.case, *row) for row in rows]
    return lines[1:]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(figure: Figure) -> str:
    return figure.ratio.as_multiple if figure.ratio else f"{_readable(figure.value)} {figure.unit}".rstrip()


def _readable(value: float) -> str:
    """Three digits that count, and thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
