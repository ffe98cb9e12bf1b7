"""Draws the state diagrams of the docs site: what GitHub makes of a `mermaid` block, without a script.

The site asks no other host for anything, and Mermaid itself is three megabytes of script. Our diagrams are plain moves
between a few states, so they are drawn as such: a column for each state, a row for what moves requests alike, arrows
from the states that it leaves to the one that it leads to. It must not know what the states mean.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from html import escape

MOVE = re.compile(r"^\s*(\S+) --> ([^\s:]+)(?:: (.+))?$", re.MULTILINE)
OUTSIDE = "[*]"
ARROW = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M0 0L8 4L0 8z"/></marker></defs>'
)
LETTER, LINE, HEAD, GAP, DOT = 7.3, 17, 44, 12, 4  # of monospaced letters of 12 pixels, and what stands around them


def svg_of(source: str, _language: str, css_class: str, *_: object, **__: object) -> str:
    """A formatter of `pymdownx.superfences` for a Mermaid state diagram of moves.

    Raises:
        ValueError: a line is no move.
    """
    lines = source.strip().splitlines()
    found = [MOVE.match(line) for line in lines[1:]]
    if lines[0] != "stateDiagram-v2" or not all(found):
        raise ValueError(f"no state diagram of moves: {source}")
    moves = [(each[1], each[2], (each[3] or "").split(", ")) for each in found if each]
    return f'<div class="{css_class}">{"".join(_svg(moves))}</div>'


def _svg(moves: list[tuple[str, str, list[str]]]) -> Iterator[str]:
    states = [state for state in dict.fromkeys(state for move in moves for state in move[:2]) if state != OUTSIDE]
    rows = _rows(moves)
    left = LETTER * max(len(event) for events in rows.values() for event in events) + GAP
    column = LETTER * max(map(len, states)) + 1.5 * GAP
    x = {state: round(left + column * (index + 0.5), 1) for index, state in enumerate(states)}
    width, height = left + column * len(states), HEAD + sum(LINE * len(events) + GAP for events in rows.values())
    said = "; ".join(f"{source} to {dest}: {', '.join(events)}" for source, dest, events in moves)
    yield f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" style="min-width:{0.7 * width:.0f}px" '
    yield f'role="img" aria-label="{escape(said)}">{ARROW}'
    pairs = {move[:2] for move in moves}
    for state in states:
        kind = "first" if (OUTSIDE, state) in pairs else "last" if (state, OUTSIDE) in pairs else ""
        yield f'<line class="life" x1="{x[state]}" x2="{x[state]}" y1="{HEAD - GAP}" y2="{height}"/>'
        yield (
            f'<rect class="state {kind}" x="{x[state] - column / 2 + 4:.1f}" y="4" width="{column - 8:.1f}" '
            f'height="{HEAD - 18}" rx="6"/><text class="middle" x="{x[state]}" y="21">{escape(state)}</text>'
        )
    y = float(HEAD)
    for (sources, dest), events in rows.items():
        height = LINE * len(events) + GAP
        for index, event in enumerate(events):
            yield f'<text class="end" x="{left - GAP:.1f}" y="{y + GAP / 2 + LINE * index + 12}">{escape(event)}</text>'
        middle = y + height / 2
        columns = [x[state] for state in sources]
        for begin, end in ((min(columns), x[dest] - 3), (max(columns), x[dest] + 3)):
            if (begin < x[dest]) == (end < x[dest]):  # one arrow from each side that there is
                yield f'<line class="move" x1="{begin}" x2="{end}" y1="{middle}" y2="{middle}"/>'
        yield from (f'<circle cx="{x[state]}" cy="{middle}" r="{DOT}"/>' for state in sources)
        y += height
    yield "</svg>"


def _rows(moves: list[tuple[str, str, list[str]]]) -> dict[tuple[tuple[str, ...], str], list[str]]:
    """The states that are left, and the one that is led to → the events that do so."""
    sources: dict[tuple[str, str], list[str]] = defaultdict(list)
    for source, dest, events in moves:
        if OUTSIDE not in (source, dest):
            for event in events:
                sources[event, dest].append(source)
    rows: dict[tuple[tuple[str, ...], str], list[str]] = defaultdict(list)
    for (event, dest), found in sources.items():
        rows[tuple(found), dest].append(event)
    return rows
