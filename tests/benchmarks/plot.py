"""A bar for each ratio, with its spread, as an SVG that reads on light and on dark pages. Same figures, same bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from benchmarks.figures import Figure
from benchmarks.results import Result

_WIDTH, _LEFT, _RIGHT = 860, 330, 100
_BAR, _GAP, _HEAD = 14, 10, 44
_COLORS = ("#3b82c4", "#d9822b", "#3a9d5d", "#a05bb5", "#8a8f98", "#c4484f")
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#24292f}.quiet{fill:#6a737d}.title{font-weight:600;font-size:14px}"
    ".line{stroke:#24292f}.grid{stroke:#d0d7de}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.quiet{fill:#9da7b1}.line{stroke:#e6edf3}.grid{stroke:#444c56}}"
)


def bars(what: str, results: Sequence[Result]) -> str:
    """The ratios of `what`, grouped by case. The line at 1 is the anchor."""
    groups = [(result.case, [f for f in result.figures if f.what == what and f.ratio]) for result in results]
    groups = [(case, figures) for case, figures in groups if figures]
    contenders = list(dict.fromkeys(figure.contender for _, figures in groups for figure in figures))
    color = {name: _COLORS[number % len(_COLORS)] for number, name in enumerate(contenders)}
    spreads = [figure.ratio for _, figures in groups for figure in figures if figure.ratio]
    top = max(1.0, *(spread.high for spread in spreads))
    step = _tick_step(top)
    ticks = [number * step for number in range(math.ceil(top / step) + 1)]
    scale = (_WIDTH - _LEFT - _RIGHT) / ticks[-1]
    height = _HEAD + sum(_GAP + (_BAR + 2) * len(figures) + _BAR + 4 for _, figures in groups) + 24
    anchors = ", ".join(dict.fromkeys(figure.anchor for _, figures in groups for figure in figures))
    lines = [
        f'<text class="title" x="8" y="18">{escape(what)}, ratio to {escape(anchors)}</text>',
        *(
            f'<line class="{"line" if tick == 1 else "grid"}" x1="{_LEFT + tick * scale:.1f}" '
            f'x2="{_LEFT + tick * scale:.1f}" y1="30" y2="{height - 20}"/>'
            f'<text class="quiet" text-anchor="middle" x="{_LEFT + tick * scale:.1f}" y="{height - 6}">{tick:g}</text>'
            for tick in sorted({*ticks, 1.0})
        ),
    ]
    y = _HEAD
    for case, figures in groups:
        lines.append(f'<text class="quiet" x="8" y="{y + 10}">{escape(case)}</text>')
        y += _BAR + 4
        for figure in figures:
            lines += _bar(figure, y, scale, color[figure.contender])
            y += _BAR + 2
        y += _GAP
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img" '
        f'aria-label="{escape(what)}">\n<style>{_STYLE}</style>\n{body}\n</svg>\n'
    )


def _bar(figure: Figure, y: int, scale: float, color: str) -> list[str]:
    assert figure.ratio
    low, middle, high = (_LEFT + value * scale for value in (figure.ratio.low, figure.ratio.median, figure.ratio.high))
    center = y + _BAR / 2
    return [
        f'<text text-anchor="end" x="{_LEFT - 8}" y="{y + 11}">{escape(figure.contender)}</text>',
        f'<rect x="{_LEFT}" y="{y}" width="{middle - _LEFT:.1f}" height="{_BAR}" fill="{color}"/>',
        f'<line class="line" x1="{low:.1f}" x2="{high:.1f}" y1="{center}" y2="{center}"/>',
        f'<text x="{max(middle, high) + 6:.1f}" y="{y + 11}">{figure.ratio.median:.2f}</text>',
    ]


def _tick_step(top: float) -> float:
    """A round number of which four to ten fit below `top`."""
    power = 10 ** math.floor(math.log10(top / 4))
    return next(power * factor for factor in (1, 2, 5, 10) if top / (power * factor) <= 10)
