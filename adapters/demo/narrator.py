"""What the demo says while it works: a live line on a terminal, plain lines elsewhere. All of it on stderr."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Narrator:
    """Shows one run of an engine; used as a context manager."""

    def __init__(self, name: str, num_requests: int, console: Console) -> None:
        self._name = name
        self._num_requests = num_requests
        self._console = console
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task(name, total=None)
        self._last_counts = (0, 0)

    def __enter__(self) -> Self:
        """Begin to show."""
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the live line away."""
        if self._console.is_terminal:
            self._progress.stop()

    def listen(self, message: dict[str, Any]) -> None:
        """Show a message of `engine.serve`."""
        match message["stage"]:
            case "model":
                self._describe("looking for the model")
            case "engine":
                self._say("model made" if message["model_made"] else "model found", message["model_s"])
                self._describe("engine starting")
            case "requests":
                self._say("engine started", message["engine_s"])
                self._progress.update(self._task, total=self._num_requests)
            case "step":
                self._show_counts(message["num_done"], message["num_preemptions"])
            case "ending":
                self._describe("all requests done, engine ending")
            case _:
                pass

    def finished(self, result: dict[str, Any]) -> None:
        """Show the sum of the run."""
        what = f"{self._num_requests} requests done, {result['num_preemptions']} preemptions"
        self._say(what, result["duration_s"])

    def _show_counts(self, num_done: int, num_preemptions: int) -> None:
        counts = f"{num_done} of {self._num_requests} requests done, preemptions so far: {num_preemptions}"
        self._progress.update(self._task, completed=num_done, description=f"{self._name}: {counts}")
        if not self._console.is_terminal and (num_done, num_preemptions) != self._last_counts:
            self._console.print(f"{self._name}: {counts}", soft_wrap=True)
        self._last_counts = (num_done, num_preemptions)

    def _describe(self, what: str) -> None:
        self._progress.update(self._task, description=f"{self._name}: {what}")

    def _say(self, what: str, seconds: float) -> None:
        self._console.print(f"{self._name}: {what} ({seconds:.1f} s)", soft_wrap=True)
