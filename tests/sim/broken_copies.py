"""Copy engines that fail on purpose: nothing has moved then, as with a full or broken host."""

from __future__ import annotations

from typing import Any

BROKEN = "broken on purpose"


class BrokenCopies:
    """Wraps a copy engine; fails saves or loads, all of them or the first."""

    def __init__(self, inner: Any, what: str, failures: list[str]) -> None:
        self._inner = inner
        self._what = what
        self._failures = failures

    def start_save(self, block_ids: Any, slots: Any) -> Any:
        """Device to host; it fails when it is waited for."""
        return self._start("save", block_ids, slots)

    def start_load(self, slots: Any, block_ids: Any) -> Any:
        """Host to device; it fails when it is waited for."""
        return self._start("load", slots, block_ids)

    def _start(self, what: str, sources: Any, destinations: Any) -> Any:
        if what == self._what and self._failures:
            return BrokenCopy(self._failures.pop())
        return getattr(self._inner, f"start_{what}")(sources, destinations)

    def close(self) -> None:
        """Close the wrapped engine."""
        self._inner.close()


class BrokenCopy:
    """A copy that came to nothing."""

    def __init__(self, error: str) -> None:
        self._error = error

    def done(self) -> bool:
        """It is over."""
        return True

    def precede(self) -> None:
        """Nothing comes after it."""

    def result(self) -> Any:
        """Tell why."""
        raise RuntimeError(self._error)


def break_copies(engine: Any, what: str, num_failures: int) -> None:
    """From now on: synchronous and asynchronous ones."""
    side = engine.worker._worker_side
    failures = [BROKEN] * num_failures
    side._engine = BrokenCopies(side._engine, what, failures)
    if side._async_engine is not None:
        side._async_engine = BrokenCopies(side._async_engine, what, failures)
