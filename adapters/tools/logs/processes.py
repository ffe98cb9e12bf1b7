"""Processes for work on several cores. They end when the process that started them ends.

This module must not depend on logs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import ParamSpec, TypeVar

from kvledger.adapters.child_python import without_working_directory

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Processes:
    """Up to `number` processes, started when needed. Arguments and results of calls must be plain data."""

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._reader, self._writer = context.Pipe(duplex=False)
        with without_working_directory():  # the executor's locks start multiprocessing's resource tracker
            self._executor = ProcessPoolExecutor(number, context, _end_with, (self._reader,))

    def submit(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        """Call the function in one of the processes. Calls begin in the order of submission.

        The future raises `BrokenExecutor` if one of the processes was killed.
        """
        # Only this process handles Ctrl-C. A child that has just started would print a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with without_working_directory():
                return self._executor.submit(function, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def end(self) -> None:
        """End the processes, whatever they are doing."""
        self._writer.close()
        self._executor.shutdown(cancel_futures=True)
        self._reader.close()


class ProcessLost(Exception):
    """A call was tried several times, and each time its process was killed, lacked memory, or could not be started."""


class SeparateProcesses:
    """Makes up to `number` calls at the same time. Each process makes one call at a time.

    If the process of a call is killed or lacks memory, the call is made again in a new process, up to `num_tries` times
    in all. The other calls continue.
    """

    def __init__(self, number: int, *, num_tries: int = 2) -> None:
        self._threads = ThreadPoolExecutor(number)
        self._num_tries = num_tries
        self._lock = threading.Lock()
        self._idle: list[Processes] = []
        self._all: list[Processes] = []
        self._has_ended = False

    def submit(
        self, function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        """Call the function. Calls begin in the order of submission.

        The future raises `ProcessLost` if, at every try, the process was killed, lacked memory, or could not be
        started. If the function raises another exception than `MemoryError`, the future raises this exception.
        """
        return self._threads.submit(self._tried, partial(function, *args, **kwargs))

    def end(self) -> None:
        """End the processes, whatever they are doing."""
        with self._lock:
            self._has_ended = True
            started = list(self._all)
        for each in started:
            each.end()
        self._threads.shutdown(cancel_futures=True)

    def _tried(self, call: Callable[[], _Result]) -> _Result:
        reason = ""
        for _ in range(self._num_tries):
            try:
                own = self._one()
                future = own.submit(call)
            except OSError as error:  # no further process can be started
                reason = f"no process could be started ({error.strerror or error})"
                continue
            try:
                result = future.result()
            except MemoryError:
                reason = "its process had too little memory"
            except BrokenExecutor:
                reason = "its process was killed, perhaps because the machine had too little memory"
            else:
                with self._lock:
                    self._idle.append(own)
                return result
            own.end()
        raise ProcessLost(f"{reason}, {self._num_tries} times")

    def _one(self) -> Processes:
        with self._lock:
            if self._has_ended:
                raise ProcessLost("the command has ended")
            if self._idle:
                return self._idle.pop()
            self._all.append(Processes(1))
            return self._all[-1]


@contextmanager
def separate_processes(number: int) -> Iterator[SeparateProcesses]:
    """Provide up to `number` processes until the context ends."""
    started = SeparateProcesses(number)
    try:
        yield started
    finally:
        started.end()


def _end_with(reader: Connection) -> None:
    """End this process when the process that started it closes the pipe or dies."""

    def wait() -> None:
        reader.poll(None)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
