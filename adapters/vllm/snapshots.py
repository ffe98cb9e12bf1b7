"""Makes the snapshots of a log in a separate process, so that the engine does not slow down.

Any process that can read a log can make the log's snapshots. For each new segment, the engine starts
`adapters/snapshot_writer.py` at a low priority. If a snapshot cannot be made, kvledger logs a warning and goes on
serving requests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from kvledger.adapters.child_python import child_environment
from kvledger.adapters.vllm.messages import messages
from kvledger.lifecycle import Core, StateHandler
from kvledger.storage.events import segments_without_snapshot

_WRITER = "kvledger.adapters.snapshot_writer"
"""Module that makes snapshots. It runs in another process, because it imports kvledger's tools, which this process must
not import."""
_PRIORITIES = 19, 5
"""Niceness of the process if one segment lacks a snapshot, and if several segments do. If all cores are busy, a process
with the lowest priority gets only a hundredth of a core. Retention waits for a snapshot only for a limited time."""


class SnapshotProcess:
    """Starts the process that makes the snapshots of logs. `core` is the core with which the logs are written."""

    def __init__(self, core: Core) -> None:
        brought = {type(each) for each in _handlers(Core.standard().extended(*core.extensions))}
        named = (type(each) for each in _handlers(core) if type(each) not in brought)
        handlers = dict.fromkeys(f"{each.__module__}:{each.__qualname__}" for each in named)
        extensions = [extension.declaration().made_by for extension in core.extensions]
        self._modules = [name.partition(":")[0] for name in (*handlers, *extensions)]
        self._options = [
            *(word for name in handlers for word in ("--handlers", name)),
            *(word for name in extensions for word in ("--extensions", name)),
        ]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def make(self, directory: Path) -> None:
        """See `SnapshotMaker`."""
        try:
            num_lacking = len(segments_without_snapshot(directory))
            if not num_lacking:
                return
            with self._lock:
                if self._is_stopped:
                    return
                self._process = process = self._begin(directory, _PRIORITIES[num_lacking > 1])
            _, error = process.communicate()
            if process.returncode and not self._is_stopped:
                _report(directory, error.decode(errors="replace").strip())
        except OSError as error:
            _report(directory, str(error))

    def stop(self) -> None:
        """See `SnapshotMaker`."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.terminate()

    def _begin(self, directory: Path, priority: int) -> subprocess.Popen[bytes]:
        # In its own session: signals from a terminal to the server must not reach it.
        process = subprocess.Popen(  # noqa: S603 -- this very interpreter and package
            [sys.executable, "-P", "-m", _WRITER, str(directory), *self._options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=child_environment(self._modules),
            start_new_session=True,
        )
        os.setpriority(os.PRIO_PROCESS, process.pid, priority)
        return process


def _handlers(core: Core) -> Iterator[StateHandler]:
    return (handler for handlers in core.handlers.values() for handler in handlers)


def _report(directory: Path, error: str) -> None:
    messages.warning("snapshots could not be made; the log is not affected", log=str(directory), error=error)
