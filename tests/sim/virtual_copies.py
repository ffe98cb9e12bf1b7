"""Copies in virtual time: bytes move as late as they may, so that whoever reuses a block is caught.

The real engines use a thread or a device, whose pace would decide what a seed shows; `tests/storage` is about those.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from sim.clock import VirtualClock


class VirtualCopy:
    """A copy that was started. Its bytes move when somebody waits for it, or looks after its time has come."""

    def __init__(self, move: Callable[[], Any], clock: VirtualClock, due_ns: int) -> None:
        self._move: Callable[[], Any] | None = move
        self._clock = clock
        self._result: Any = None
        self._error: Exception | None = None
        self._is_known = False
        self.due_ns = due_ns

    @property
    def has_moved(self) -> bool:
        """Whether its bytes are in place; looking changes nothing."""
        return self._move is None

    def done(self) -> bool:
        """Whether its time has come."""
        if self._clock.now_ns >= self.due_ns:
            self._end()
        return self._is_known

    def precede(self) -> None:
        """Move the bytes before anything else does. A device has its order; that they have moved is known later."""
        self._move_now()

    def result(self) -> Any:
        """Move the bytes, if that has not been done."""
        self._end()
        if self._error is not None:
            raise self._error
        return self._result

    def _end(self) -> None:
        self._move_now()
        self._is_known = True

    def _move_now(self) -> None:
        if self._move is not None:
            move, self._move = self._move, None
            try:
                self._result = move()
            except Exception as error:  # noqa: BLE001 -- the worker is told; that nothing could begin at once
                self._error, self._is_known = error, True


class VirtualCopies:
    """A copy engine whose copies take a drawn time; those of one direction end in their order."""

    def __init__(self, engine: Any, clock: VirtualClock, rng: random.Random) -> None:
        self._save, self._load = engine.start_save, engine.start_load
        self._clock = clock
        self._rng = rng
        self._last_due_ns = {"save": 0, "load": 0}
        self._started: list[VirtualCopy] = []

    def start_save(self, block_ids: Sequence[int], slots: Sequence[int]) -> VirtualCopy:
        """Device to host."""
        return self._start("save", lambda: self._save(block_ids, slots).result())

    def start_load(self, slots: Sequence[int], block_ids: Sequence[int]) -> VirtualCopy:
        """Host to device."""
        return self._start("load", lambda: self._load(slots, block_ids).result())

    def close(self) -> None:
        """Finish what was started."""
        for copy in self._started:
            copy.precede()

    def _start(self, direction: str, move: Callable[[], Any]) -> VirtualCopy:
        duration_ns = self._rng.choice((0, 1, 10, 30, 200)) * 1_000_000
        due_ns = max(self._last_due_ns[direction], self._clock.now_ns + duration_ns)
        self._last_due_ns[direction] = due_ns
        copy = VirtualCopy(move, self._clock, due_ns)
        self._started = [*(other for other in self._started if not other.has_moved), copy]
        return copy
