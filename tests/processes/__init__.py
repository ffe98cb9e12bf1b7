"""Processes that tests start: each hears the signals that a person can send it, and none outlives its test.

What a shell starts in the background ignores SIGINT, and so does all that it starts in its turn: a test that sends one
would wait for ever. And a child that is only waited for keeps a test from ending, even by a time limit.

Nothing here has a time limit: how long something takes decides no test. pytest's own limit ends what hangs, and the
clean-up here then kills what was started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ENDING_WITH_ITS_PARENT = ("setpriv", "--pdeathsig")
"""In front of a signal and a command: it is sent to what the command starts when the starting process ends, even if
that is killed. Linux only.
"""
_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def started(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process at the head of a group of its own; when the context is left, however it is left, all of it is killed.

    All is the group, and what the process has started in other groups if it still runs. `options` are those of
    `subprocess.Popen`.
    """
    with _signals_heard():
        process = subprocess.Popen([str(word) for word in command], start_new_session=True, **options)
    try:
        yield process
    finally:
        below = _descendants(process.pid)
        for kill, number in ((os.killpg, process.pid), *((os.kill, child) for child in below)):
            with contextlib.suppress(ProcessLookupError):  # nobody is left
                kill(number, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was still to be written to a process that is gone
                    stream.close()


def finished(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a process to its end, and return its exit code and what it said."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with started(command, **{**pipes, **options}) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def forked(work: Callable[[], int | None]) -> int:
    """Do `work` in a forked process; returns what it returned, 1 where it raised, minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        exit_code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            exit_code = work() or 0
        except BaseException:  # noqa: BLE001 -- nothing may return into the parent's stack
            traceback.print_exc(file=sys.__stderr__)  # a fixture may have put something else in its place, in memory
        finally:
            sys.__stderr__.flush()
            os._exit(exit_code)
    with killed_on_failure(child):
        _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def run_and_kill(work: Callable[[], None], number: signal.Signals = signal.SIGKILL) -> None:
    """Do `work` in a forked process that then sends itself a deadly signal: no `finally` and no exit handler runs."""

    def be_killed() -> None:
        work()
        os.kill(os.getpid(), number)
        signal.pause()

    assert forked(be_killed) == -number, "the process failed before it was killed; its traceback stands in stderr"


@contextlib.contextmanager
def killed_on_failure(child: int) -> Iterator[None]:
    """Wait for a forked process inside: whatever interrupts that kills it."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        raise


def wait_until(condition: Callable[[], bool]) -> None:
    """Return as soon as the condition holds."""
    while not condition():
        time.sleep(0.01)


def _descendants(pid: int) -> list[int]:
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            for child in map(int, children.read_text().split()):
                found += [child, *_descendants(child)]
    return found


@contextlib.contextmanager
def _signals_heard() -> Iterator[None]:
    """What is ignored here is not ignored in a process that is started meanwhile: an exec resets what is handled."""
    ignored = [number for number in _HEARD if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
