"""A copy engine that is as slow as a test wants: no copy moves a byte before the test, or a wait, says so.

What a copy reads it reads at its end, so that blocks which were overwritten too early give a wrong copy, and what it
writes it writes then, so that blocks which were used too early are seen to be empty. No clock and no thread decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvledger.storage.kv import CopyResult


class SlowCopy:
    """A copy that was started and does nothing until it is finished, made to fail, or waited for."""

    def __init__(
        self, what: str, block_ids: tuple[int, ...], copy: Callable[[], CopyResult], num_questions: int | None
    ) -> None:
        self.what = what
        self.block_ids = block_ids
        self.was_waited_for = False
        self._copy = copy
        self._num_questions = num_questions
        self._result: CopyResult | None = None
        self._error: Exception | None = None

    def finish(self) -> None:
        """Move the bytes, or fail as the copy itself does; a second time changes nothing."""
        if not self.is_over:
            try:
                self._result = self._copy()
            except Exception as error:  # noqa: BLE001 -- it is the worker that is told, and not before it asks
                self._error = error

    def fail(self, error: str = "broken on purpose") -> None:
        """Move nothing."""
        self._error = RuntimeError(error)

    @property
    def is_over(self) -> bool:
        """Whether somebody finished it or made it fail."""
        return self._result is not None or self._error is not None

    def done(self) -> bool:
        """The worker asks, once a step."""
        if self._num_questions is not None and not self.is_over:
            if not self._num_questions:
                self.finish()
            else:
                self._num_questions -= 1
        return self.is_over

    def precede(self) -> None:
        """Nothing that follows comes before it: finish it if nobody did."""
        self.was_waited_for = self.was_waited_for or not self.is_over
        self.finish()

    def result(self) -> CopyResult:
        """Finish it if nobody did."""
        self.was_waited_for = self.was_waited_for or not self.is_over
        self.finish()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class SlowCopies:
    """Wraps an asynchronous engine; copies of the kinds in `slow` pend, others are done at once.

    `num_questions` lets a copy be done without the test, after the worker has asked so often whether it is.
    """

    def __init__(self, inner: Any, slow: Iterable[str] = ("load", "save"), *, num_questions: int | None = None) -> None:
        self._inner = inner
        self._num_questions = num_questions
        self.slow = set(slow)
        self.started: list[SlowCopy] = []

    def pending(self, what: str = "") -> list[SlowCopy]:
        """Copies that are not done, of one direction or of both, in the order in which they were started."""
        return [copy for copy in self.started if not copy.is_over and copy.what.startswith(what)]

    def start_save(self, block_ids: Iterable[int], slots: Iterable[int]) -> SlowCopy:
        """Device to host."""
        block_ids, slots = tuple(block_ids), tuple(slots)
        return self._start("save", block_ids, lambda: self._inner.start_save(block_ids, slots).result())

    def start_load(self, slots: Iterable[int], block_ids: Iterable[int]) -> SlowCopy:
        """Host to device."""
        block_ids, slots = tuple(block_ids), tuple(slots)
        return self._start("load", block_ids, lambda: self._inner.start_load(slots, block_ids).result())

    def close(self) -> None:
        """Finish what pends, then close the wrapped engine."""
        for copy in self.pending():
            copy.finish()
        self._inner.close()

    def _start(self, what: str, block_ids: tuple[int, ...], move: Callable[[], CopyResult]) -> SlowCopy:
        copy = SlowCopy(what, block_ids, move, self._num_questions)
        self.started.append(copy)
        if what not in self.slow:
            copy.finish()
        return copy


def delay(engine: Any, num_questions: int = 1) -> None:
    """Let the asynchronous copies of every rank take a step or more each, by the same count in every run."""
    for worker in engine.workers:
        side = worker._worker_side
        if side._async_engine is not None:
            side._async_engine = SlowCopies(side._async_engine, num_questions=num_questions)


def slow_down(engine: Any, *slow: str) -> list[SlowCopies]:
    """Let the asynchronous copies of every rank pend, of the named kinds or of both; one engine per rank."""
    copies = []
    for worker in engine.workers:
        side = worker._worker_side
        side._async_engine = SlowCopies(side._async_engine, slow or ("load", "save"))
        copies.append(side._async_engine)
    return copies
