"""A process that is killed just before, in the middle of, or just after its n-th change of a file.

The child is forked, every function of `os` that changes a file is counted in it, and at the point it kills itself with
SIGKILL: no handler, no `finally`, no flush runs, and what the kernel was given stays.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, Literal

import attrs
from processes import killed_on_failure

COUNTED = ("open", "write", "pwrite", "fsync", "fdatasync", "rename", "ftruncate", "unlink", "mkdir")
_NUMBER = struct.Struct("<q")


@attrs.frozen
class KillPoint:
    """Where to die: at the n-th counted call (from 0), and at which moment of it. Without a number: never."""

    number: int | None = None
    moment: Literal["before", "middle", "after"] = "before"


@attrs.frozen
class Killed:
    """What is known of a child afterwards."""

    last_acknowledged: int
    num_calls: int
    """How many calls were counted, where it came to its end."""
    was_killed: bool


def run_until_killed(
    point: KillPoint,
    work: Callable[[Callable[[int], None]], None],
    kill_when: Callable[[int], None] | None = None,
) -> Killed:
    """Do `work(acknowledge)` in a child that dies at `point`; `kill_when(pid)` may kill it from outside, too.

    Raises `AssertionError` with the child's traceback where `work` raised.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_the_child(point, work, writing)
    os.close(writing)
    with killed_on_failure(child):
        if kill_when is not None:
            kill_when(child)
        with os.fdopen(reading, "rb") as pipe:
            told = pipe.read()
        _, status = os.waitpid(child, 0)
    was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if not was_killed and os.waitstatus_to_exitcode(status) != 0:
        raise AssertionError(f"the writer failed at {point}; its traceback stands in stderr")
    numbers = [_NUMBER.unpack_from(told, at)[0] for at in range(0, len(told) - _NUMBER.size + 1, _NUMBER.size)]
    num_calls = 0 if was_killed else -numbers.pop()
    return Killed(max(numbers, default=0), num_calls, was_killed)


def _be_the_child(point: KillPoint, work: Callable[[Callable[[int], None]], None], writing: int) -> None:
    tell = os.write
    counter = _Counter(point)
    try:
        counter.install()
        work(lambda sequence: tell(writing, _NUMBER.pack(sequence)) and None)
        tell(writing, _NUMBER.pack(-counter.num_calls))
    except BaseException:  # noqa: BLE001 -- nothing may return into the parent's stack
        sys.stderr.write(traceback.format_exc())
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


class _Counter:
    def __init__(self, point: KillPoint) -> None:
        self.num_calls = 0
        self._point = point

    def install(self) -> None:
        for name in COUNTED:
            # What was given to the kernel stays also unsynced: a sync is a place to die, and takes no time.
            setattr(os, name, self._counted(name, (lambda _: None) if "sync" in name else getattr(os, name)))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if name == "fdatasync" and threading.current_thread() is not threading.main_thread():
                return function(*arguments, **options)  # comes when it likes; the numbers must stay the same
            is_here, self.num_calls = self.num_calls == self._point.number, self.num_calls + 1
            if not is_here:
                return function(*arguments, **options)
            if self._point.moment == "middle" and name in {"write", "pwrite"}:
                descriptor, data, *position = arguments
                function(descriptor, bytes(data)[: len(data) // 2], *position)
            elif self._point.moment == "after":
                with contextlib.suppress(OSError):
                    function(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)
            return None

        return counted
