"""Standard output and standard error of commands. The program that reads them may end at any moment.

A failed write raises `OutputFailed`. `OutputFailed` is not an `Exception`, so code that reports an error of a log and
continues does not catch it. This module must not know what is written.
"""

from __future__ import annotations

import io
import os
import select
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvledger.adapters.tools.cli.output_failed import OutputFailed

__all__ = ["guard_standard_streams", "notice_reader", "silence_standard_streams"]


class _Guarded(io.FileIO):
    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise _failed(error) from error


def _failed(error: OSError) -> OutputFailed:
    from kvledger.adapters.tools.cli.output_failed import OutputFailed  # noqa: PLC0415 -- imports the core

    return OutputFailed(error)


def guard_standard_streams() -> None:
    """Make failed writes to stdout and stderr raise `OutputFailed`. If one of the two is closed, discard writes to it.

    Does not touch a stdout or stderr that other code has replaced.
    """
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        sys.stdout = _guarded(sys.stdout, 1)
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        sys.stderr = _guarded(sys.stderr, 2)


def _guarded(stream: TextIO | None, number: int) -> TextIO:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123 -- for the rest of the process
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Guarded(number, "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=number != 1 or stream.isatty(),
    )


def notice_reader() -> None:
    """Raise `OutputFailed` if stdout is a pipe that no program reads any more, even if there is nothing to write."""
    if isinstance(getattr(getattr(sys.stdout, "buffer", None), "raw", None), _Guarded):
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if any(happened & select.POLLERR for _, happened in poll.poll(0)):
            raise _failed(BrokenPipeError())


def silence_standard_streams() -> None:
    """Discard the text buffered for stdout and stderr, so that Python reports no error when it flushes them at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(getattr(getattr(stream, "buffer", None), "raw", None), _Guarded):
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
