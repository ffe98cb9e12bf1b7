"""The seam between the worker and the engines that copy: whoever wants to see or to break copies wraps them here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvledger.adapters.vllm.worker_side import WorkerSide

Copy = Callable[..., Any]


class Copies:
    """The copy calls of one worker, by name.

    `save` and `load` start a copy that the step waits for, `async_save` and `async_load` one that it does not.
    """

    def __init__(self, worker_side: WorkerSide) -> None:
        self._engines: dict[str, Any] = {"": worker_side._engine, "async_": worker_side._async_engine}

    def wrap(self, name: str, around: Callable[[str, Copy], Copy]) -> None:
        """Replace the call by `around(name, call)`; the last wrap is the outermost."""
        direction = name.removeprefix("async_")
        engine = self._engines[name.removesuffix(direction)]
        if engine is not None:
            call = f"start_{direction}"
            setattr(engine, call, around(name, getattr(engine, call)))
