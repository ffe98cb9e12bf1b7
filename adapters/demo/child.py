"""Runs one engine in a child process, passes on its progress, and leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvledger.adapters.demo.engine import ENVIRONMENT, EngineJob

SECONDS_TO_END = 5.0
NUM_LAST_LINES = 25


class EngineFailed(RuntimeError):
    """The engine's process ended without a result; the message shows the last lines of what it said."""


def run_engine(job: EngineJob, chatter: Path, report: Callable[[str], None]) -> dict[str, Any]:
    """Run `job`; its stdout and stderr go to the file `chatter`, its progress to `report`.

    Returns:
        The result of `engine.serve`.

    Raises:
        EngineFailed: there was no result.
    """
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "kvledger.adapters.demo.engine", msgspec.json.encode(job).decode(), str(write_end)]
    result: dict[str, Any] | None = None
    with chatter.open("wb") as output, os.fdopen(read_end) as messages:
        try:
            process = subprocess.Popen(  # noqa: S603 -- our own module, run by this very interpreter
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(write_end,),
                env={**ENVIRONMENT, **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
                start_new_session=True,  # a group of its own: whatever vLLM starts can be ended with it
            )
        finally:
            os.close(write_end)  # the child holds the other one: the pipe ends when the child does
        try:
            for line in messages:
                message: dict[str, Any] | str = json.loads(line)
                if isinstance(message, str):
                    report(message)
                else:
                    result = message
            process.wait()
        finally:
            _end(process)
    if result is None or process.returncode != 0:
        raise EngineFailed(_last_words(process.returncode, chatter))
    return result


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and everything in its group; also when it has ended itself."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
    with contextlib.suppress(ProcessLookupError):  # nobody is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(exit_status: int, chatter: Path) -> str:
    lines = chatter.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:]
    quoted = "\n".join(f"    {line}" for line in lines) or "    (nothing)"
    return f"the engine ended with status {exit_status} and no result; the last it said, from {chatter}:\n{quoted}"
