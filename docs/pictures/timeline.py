"""Draws the README's picture: the requests of a log as bars, and what happened to one that was preempted.

    make demo && .venv/bin/python docs/pictures/timeline.py build/demo/logs/* > docs/pictures/timeline.svg

Every figure in it is read from the log. It has its own paper, so it can be read on any page, and follows the reader's
colour scheme.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

from kvledger.adapters.tools.export.axis import Axis
from kvledger.adapters.tools.export.reading import read_trace
from kvledger.adapters.tools.export.reasons import Reasons
from kvledger.adapters.tools.export.shown import Request, Shown
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.reading import begin_model
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.visible import remark
from kvledger.adapters.units import duration, plural, size

WIDTH, LEFT, RIGHT, TOP, LANE, BAR = 900, 104, 876, 78, 32, 14
WORDS_HEIGHT, MAX_TICKS = 22, 8
LEGEND = {
    "new": "waiting",
    "chunked_prefill": "prefill",
    "running": "running",
    "preempted": "preempted",
    "load": "copied back (not to scale)",
}
STYLE = """
  svg { --paper: #fff; --line: #d9dde1; --ink: #1c2024; --dim: #60666d; --glow: #fff6ec;
    --new: #c3c9d0; --chunked_prefill: #7fb8e6; --running: #3f8f5f; --preempted: #e07b39; --hatch: #a84e14;
    --load: #0b6fd6; }
  @media (prefers-color-scheme: dark) { svg { --paper: #14171a; --line: #31373d; --ink: #e4e7ea; --dim: #9aa2ab;
    --glow: #241d17; --new: #59616a; --chunked_prefill: #3d7cb0; --running: #3f9c66; --preempted: #d9722e;
    --hatch: #ffd2b0; --load: #58a6ff; } }
  text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; fill: var(--ink); }
  .title { font-size: 16px; font-weight: 600; } .dim { fill: var(--dim); font-size: 12px; }
  .tick-label { text-anchor: middle; } .end { text-anchor: end; }
  .strong { font-weight: 600; } .paper { fill: var(--paper); stroke: var(--line); } .glow { fill: var(--glow); }
  .tick { stroke: var(--line); } .new { fill: var(--new); } .chunked_prefill { fill: var(--chunked_prefill); }
  .running { fill: var(--running); } .preempted { fill: url(#hatch); } .recovering, .load { fill: var(--load); }
  .hatch-paper { fill: var(--preempted); } .hatch-line { stroke: var(--hatch); stroke-width: 2; }
  .number { fill: var(--ink); } .digit { fill: var(--paper); font-size: 11px; font-weight: 700; text-anchor: middle; }
"""


class Picture:
    """The elements of the picture."""

    def __init__(self, requests: list[Request], chosen: Request, num_recomputed: int) -> None:
        self._requests = requests
        self._chosen = chosen
        self._num_recomputed = num_recomputed
        self._axis = Axis((request.life.since_ns, state.last_ns) for request in requests for state in request.states)
        self._bottom = TOP + LANE * len(requests)
        self._story = list(self._moments())

    def svg(self) -> Iterator[str]:
        """The file, line by line."""
        height = self._bottom + 36 + WORDS_HEIGHT * len(self._story)
        name = self._name(self._chosen)
        title = f"{name} is preempted and goes on: {self._tokens_again()} computed a second time"
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img" aria-label="{escape(title)}">'
        )
        yield f"<style>{STYLE}</style>"
        yield (
            '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect class="hatch-paper" width="5" height="5"/>'
            '<line class="hatch-line" y2="5"/></pattern></defs>'
        )
        yield f'<rect class="paper" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
        yield text(20, 29, title[0].upper() + title[1:], "title")
        yield from self._legend()
        yield from self._lanes()
        for number, (_, words) in enumerate(self._story, 1):
            y = self._bottom + 42 + WORDS_HEIGHT * (number - 1)
            yield badge(LEFT - 14, y - 4, number) + text(LEFT, y, words)
        yield "</svg>"

    def _legend(self) -> Iterator[str]:
        x = 20
        for style, name in LEGEND.items():
            yield f'<rect class="{style}" x="{x}" y="44" width="16" height="10" rx="2"/>' + text(
                x + 22, 53, name, "dim"
            )
            x += 42 + 6.5 * len(name)
        yield text(RIGHT, 53, "a run of the demo, read from its log", "dim end")

    def _lanes(self) -> Iterator[str]:
        begin = self._axis.first_ns
        y = TOP + LANE * self._requests.index(self._chosen)
        yield f'<rect class="glow" x="12" y="{y}" width="{WIDTH - 24}" height="{LANE}" rx="5"/>'
        length_ms = (self._axis.last_ns - begin) // 10**6
        step_ms = next(
            step for power in range(12) for step in (10**power, 5 * 10**power) if length_ms / step < MAX_TICKS
        )
        for milliseconds in range(0, length_ms, step_ms):
            x = self._x(begin + milliseconds * 10**6)
            yield f'<line class="tick" x1="{x}" x2="{x}" y1="{TOP}" y2="{self._bottom}"/>'
            yield text(x, self._bottom + 15, f"{milliseconds:,} ms", "dim tick-label")
        for index, request in enumerate(self._requests):
            y = TOP + LANE * index + (LANE - BAR) / 2
            is_chosen = request is self._chosen
            yield text(20, y + 11, self._name(request), "strong" if is_chosen else "dim")
            states = [state for state in request.states if state.state != "finished"]
            for state in states:
                x, end = self._x(state.since_ns), self._x(state.last_ns)
                yield bar(state.state, x, y, max(0.8, round(end - x, 1)))
            for copy in request.copies:
                if copy.kind == "load":
                    yield bar("load", self._x(copy.since_ns) - 2, y - 3, 5, BAR + 6)
            for number, (time_ns, _) in enumerate(self._story if is_chosen else (), 1):
                yield badge(self._x(time_ns), y - 2, number)

    def _moments(self) -> Iterator[tuple[int, str]]:
        request = self._chosen
        at = next(index for index, state in enumerate(request.states) if state.state == "preempted")
        before, preempted = request.states[at - 1 : at + 1]
        load = next(copy for copy in request.copies if copy.kind == "load" and copy.since_ns >= preempted.since_ns)
        saves = [copy for copy in request.copies if copy.kind != "load" and copy.since_ns == preempted.since_ns]
        saved = f"; {size(sum(copy.num_bytes for copy in saves))} not saved yet are copied to the host first"
        tokens = plural(before.num_computed_tokens_at_end, "token")
        yield preempted.since_ns, f"vLLM takes its blocks away, with the KV of {tokens}{saved if saves else ''}."
        waited, took, tokens = load.since_ns - preempted.since_ns, load.worker_ns, plural(load.num_tokens or 0, "token")
        back = f"the KV of {tokens} comes back from host memory, {size(load.num_bytes)} in {duration(took)}."
        yield load.since_ns, f"{duration(waited)} later there is room: {back}"
        finished = request.life.summary.finished_ns
        if finished is not None:
            whole = plural(request.life.summary.num_tokens, "token")
            yield finished, f"It finishes with {whole}. Computed a second time: {self._num_recomputed}."

    def _tokens_again(self) -> str:
        return "nothing is" if not self._num_recomputed else f"{plural(self._num_recomputed, 'token')} are"

    def _x(self, time_ns: int) -> float:
        return round(LEFT + (RIGHT - LEFT) * self._axis.share(time_ns), 1)

    @staticmethod
    def _name(request: Request) -> str:
        return f"request {request.life.request_id.partition('-')[0]}"


def text(x: float, y: float, words: str, style: str = "") -> str:
    """Words that begin there."""
    return f'<text x="{x}" y="{y}"{f" class={chr(34)}{style}{chr(34)}" if style else ""}>{escape(words)}</text>'


def bar(style: str, x: float, y: float, width: float, height: float = BAR) -> str:
    """A bar."""
    return f'<rect class="{style}" x="{x}" y="{y}" width="{width}" height="{height}" rx="1.5"/>'


def badge(x: float, y: float, number: int) -> str:
    """A number in a circle."""
    return f'<circle class="number" cx="{x}" cy="{y}" r="8"/>' + text(x, y + 4, str(number), "digit")


def main(path: str) -> None:
    """Draw a log."""
    log, selection, shown = open_log(Path(path)), Selection(), Shown()
    reasons = Reasons(model := begin_model(log), selection)
    read_trace(log, model, selection, shown, remark, visitors=[reasons])
    preempted = [request for request in shown.requests if request.life.summary.num_preemptions]
    chosen = max(preempted, key=lambda request: request.life.summary.num_tokens_loaded)
    print("\n".join(Picture(shown.requests, chosen, reasons.sums().num_recomputed).svg()))


if __name__ == "__main__":
    main(*sys.argv[1:])
