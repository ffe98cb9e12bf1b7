"""Draws the README's moving picture: a terminal in which an incident is made, checked and explained.

    .venv/bin/python docs/pictures/terminal.py > docs/pictures/terminal.svg

It runs the commands in a terminal of its own and draws what they print. A reader who asks for less motion sees the end.
"""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from html import escape
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "python docs/examples/cached_answer.py incident",
    "kvledger verify incident",
    "kvledger why incident cmpl",
)
COLUMNS, ROWS = 100, 32
CHARACTER, LINE, LEFT, TOP = 7.83, 18, 16, 44
LINE_S, TYPED_S, READING_S, END_S = 0.09, 0.8, 3.5, 8.0
"""How long a line, a command, the output of a command, and the end stay before more comes."""
STYLE = """
  svg { --paper: #14171a; --ink: #e4e7ea; --dim: #9aa2ab; --red: #ff7a85; --green: #5fcf95; --yellow: #f0c05a; }
  .paper, .cover { fill: var(--paper); } .dot { fill: var(--dim); opacity: .5; }
  text { font: 13px ui-monospace, "Cascadia Mono", "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: var(--ink);
    white-space: pre; }
  .dim { fill: var(--dim); } .red { fill: var(--red); } .green { fill: var(--green); } .yellow { fill: var(--yellow); }
  .bold { font-weight: 700; }
"""


def run_in_terminal(command: list[str], folder: Path) -> str:
    """Run a command in a terminal of `COLUMNS` columns, and return what it prints with its escape sequences."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 60, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environment.get("PATH", "")))
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=theirs, stderr=subprocess.DEVNULL):  # noqa: S603 -- the commands above
        os.close(theirs)
        printed = b""
        while True:
            try:
                more = os.read(ours, 65536)
            except OSError:  # Linux reports the end of the other side as an error
                break
            if not more:
                break
            printed += more
    os.close(ours)
    return printed.decode().replace("\r\n", "\n")


def transcript(folder: Path) -> Iterator[tuple[Text, float]]:
    """Each line of the terminal, and the seconds until the next one."""
    (folder / "docs").symlink_to(ROOT / "docs")
    for command in COMMANDS:
        yield Text.assemble(("$ ", "green"), (command, "bold")), TYPED_S
        lines = run_in_terminal(command.split(), folder).rstrip("\n").split("\n")
        for line in lines:
            yield Text.from_ansi(line), LINE_S
        yield Text(), READING_S


def drawn_line(line: Text, y: float) -> str:
    """One line as an SVG text."""
    spans = []
    for segment in line.render(Console(color_system="standard", no_color=False)):
        style = segment.style
        names = [] if style is None or style.color is None else [style.color.name.removeprefix("bright_")]
        names += [name for name in ("bold", "dim") if style is not None and getattr(style, name)]
        text = escape(segment.text)
        spans.append(f'<tspan class="{" ".join(names)}">{text}</tspan>' if names else text)
    return f'<text x="{LEFT}" y="{y:g}" xml:space="preserve">{"".join(spans).rstrip()}</text>'


def drawn(lines: list[tuple[Text, float]]) -> Iterator[str]:
    """The picture, line by line."""
    width, height = 2 * LEFT + COLUMNS * CHARACTER, TOP + ROWS * LINE + 8
    total_s = sum(seconds for _, seconds in lines) + END_S
    at_s, steps, covers = 0.0, [], []
    for number, (_, seconds) in enumerate(lines, 1):
        share = 100 * at_s / total_s
        steps.append(f"{share:.3f}% {{ transform: translateY({-LINE * max(0, number - ROWS)}px) }}")
        covers.append(f"{share:.3f}% {{ transform: translateY({LINE * number}px) }}")
        at_s += seconds
    steps.append(f"100% {{ transform: translateY({-LINE * max(0, len(lines) - ROWS)}px) }}")
    covers.append(f"100% {{ transform: translateY({LINE * len(lines)}px) }}")
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
    yield "<title>kvledger verify names a broken rule, and kvledger why explains each computed token</title>"
    yield f"<style>{STYLE}"
    yield f"  @keyframes scroll {{ {' '.join(steps)} }}\n  @keyframes print {{ {' '.join(covers)} }}"
    yield f"  .screen {{ animation: scroll {total_s:.1f}s step-end infinite; }}"
    yield f"  .cover {{ animation: print {total_s:.1f}s step-end infinite; }}"
    yield "  @media (prefers-reduced-motion: reduce) { .screen, .cover { animation-play-state: paused;"
    yield f"    animation-delay: -{total_s - END_S / 2:.1f}s; }} }}\n</style>"
    yield f'<rect class="paper" width="{width:g}" height="{height:g}" rx="8"/>'
    yield from (f'<circle class="dot" cx="{LEFT + 6 + 18 * number}" cy="18" r="5"/>' for number in range(3))
    yield f'<svg x="0" y="{TOP - LINE}" width="{width:g}" height="{ROWS * LINE + 8}"><g class="screen">'
    for number, (line, _) in enumerate(lines, 1):
        if line.plain.strip():
            yield drawn_line(line, LINE * number - 4)
    yield f'<rect class="cover" width="{width:g}" height="{LINE * len(lines)}"/>'
    yield "</g></svg></svg>"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print("\n".join(drawn(list(transcript(Path(scratch))))))
