"""Processes for work on several cores, none of which outlives the one that started them. It knows no log."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Processes:
    """Up to `number` of them, started when they are needed; what they are given and return must be plain data."""

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._reader, self._writer = context.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(number, context, _end_with, (self._reader,))

    def submit(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        """Have it called in one of the processes, in the order of submission.

        The future raises `BrokenExecutor` where that process was killed.
        """
        # A Ctrl-C at the terminal is for this process: one that has just been started would print a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self._executor.submit(function, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def end(self) -> None:
        """End them, whatever they are doing."""
        self._writer.close()
        self._executor.shutdown(cancel_futures=True)
        self._reader.close()


@contextmanager
def processes(number: int) -> Iterator[Processes]:
    """That many, until the context is left."""
    started = Processes(number)
    try:
        yield started
    finally:
        started.end()


def _end_with(reader: Connection) -> None:
    """End this process when the pipe's other end is closed, which the death of the process that has it does, too."""

    def wait() -> None:
        reader.poll(None)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
