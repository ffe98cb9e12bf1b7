"""The seam between the worker and the engines that copy: whoever wants to see or to break copies wraps them here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvledger.adapters.vllm.worker_side import WorkerSide

Copy = Callable[..., Any]


class Copies:
    """The copy calls of one worker, by name: `save`, `load`, and `start_save`, `start_load` where it has them."""

    def __init__(self, worker_side: WorkerSide) -> None:
        self._engines = [getattr(worker_side, name, None) for name in ("_engine", "_overlapping")]

    def wrap(self, name: str, around: Callable[[str, Copy], Copy]) -> None:
        """Replace the call by `around(name, call)`; the last wrap is the outermost."""
        for engine in self._engines:
            copy = getattr(engine, name, None)
            if copy is not None:
                setattr(engine, name, around(name, copy))
