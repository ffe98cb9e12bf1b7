"""A real browser without a window, driven over a pipe with the DevTools protocol: pages are opened, clicked, measured.

Nothing but a Chromium is needed: `requirements/browser.sh` installs one where that is allowed. The browser is given no
network, so a page that asks for anything is seen to fail.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from processes import started

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_PATIENCE_S = 600  # only a browser that hangs takes as long
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_browser() -> str | None:
    """The path of an installed browser, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserFailed(AssertionError):
    """The browser, or a script in the page, answered with an error."""


@attrs.define(eq=False)
class Page:
    """One open page. `console` has what it logged as an error, `requests` every address it asked for."""

    _process: subprocess.Popen[bytes]
    _to_browser: int
    _from_browser: int
    console: list[str] = attrs.field(factory=list, init=False)
    requests: list[str] = attrs.field(factory=list, init=False)
    _session: str = attrs.field(default="", init=False)
    _last_id: int = attrs.field(default=0, init=False)
    _buffer: bytes = attrs.field(default=b"", init=False)
    _events: list[dict[str, Any]] = attrs.field(factory=list, init=False)

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to_browser, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise BrowserFailed(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def attach(self) -> None:
        """Open a tab and listen to it."""
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.command(f"{domain}.enable")

    def look(self, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Set the size of the window and the colour scheme."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, address: str) -> None:
        """Open an address and wait until it is loaded."""
        self.console.clear()
        self.requests.clear()
        self._events.clear()
        result = self.command("Page.navigate", url=address)
        if result.get("errorText"):
            raise BrowserFailed(f"{address}: {result['errorText']}")
        if "loaderId" in result:  # none where only the fragment changed
            self.wait_for("Page.loadEventFired")

    def wait_for(self, method: str) -> dict[str, Any]:
        """Wait for an event of the protocol."""
        while True:
            for event in self._events:
                if event["method"] == method:
                    self._events.remove(event)
                    return event
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """The value of a script in the page; a promise is waited for."""
        answer = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserFailed(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_until(self, expression: str) -> None:
        """Wait until a script gives true."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self.evaluate(expression):
            if time.monotonic() > deadline:
                raise BrowserFailed(f"not true within {_PATIENCE_S} s: {expression}")
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """Click in the middle of what a selector finds first."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def middle(self, selector: str) -> tuple[float, float]:
        """Where what a selector finds first is in the window, scrolled into view."""
        found = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            " e.scrollIntoView({block: 'center', inline: 'center'}); const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        if found is None:
            raise BrowserFailed(f"nothing matches {selector}")
        return found[0], found[1]

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        answer = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._buffer:
            if not select.select([self._from_browser], [], [], max(0, deadline - time.monotonic()))[0]:
                raise BrowserFailed(f"the browser said nothing for {_PATIENCE_S} s")
            data = os.read(self._from_browser, 1 << 20)
            if not data:
                raise BrowserFailed(f"the browser ended with exit code {self._process.wait()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self._take_event(message)
        return message

    def _take_event(self, event: dict[str, Any]) -> None:
        method, parameters = event["method"], event["params"]
        if method == "Runtime.exceptionThrown":
            self.console.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in {"error", "warning", "assert"}:
            self.console.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in {"error", "warning"}:
            self.console.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method.startswith("Page."):
            self._events.append(event)


@contextlib.contextmanager
def open_browser(browser: str, *flags: str) -> Iterator[Page]:
    """Start a browser with a new profile; it ends with the context."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, contextlib.ExitStack() as exits:
        pipes = []
        for _ in range(2):
            ends = os.pipe()
            # The browser reads from descriptor 3 and writes to 4: ours must not be one of these.
            high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
            for end in ends:
                os.close(end)
            pipes.append(high)
        (their_input, to_browser), (from_browser, their_output) = pipes
        exits.callback(os.close, to_browser)
        exits.callback(os.close, from_browser)

        def take_pipes() -> None:
            os.dup2(their_input, 3)
            os.dup2(their_output, 4)

        browser_process = started(
            [browser, *_FLAGS, *flags, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4),
            preexec_fn=take_pipes,
        )
        with browser_process as process:
            os.close(their_input)
            os.close(their_output)
            page = Page(process, to_browser, from_browser)
            page.attach()
            yield page
