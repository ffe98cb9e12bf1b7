"""Finds the logs of a scheduler's workers, and the hook in which a worker failed or hangs.

A worker records each hook call before it makes the call. The last event of its log therefore shows where the worker
hangs or was killed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import attrs

from kvledger.adapters.recorded.payloads import Called, Returned, payload_of
from kvledger.adapters.tools.exit_codes import CommandFailed
from kvledger.adapters.tools.logs.log import StoredLog, open_log
from kvledger.adapters.tools.logs.sources import workers_of
from kvledger.lifecycle import SequencedEvent
from kvledger.lifecycle import events as e
from kvledger.storage.events import is_being_written
from kvledger.storage.events.segment_file import segment_paths


@attrs.define
class WorkerCalls:
    """Finds in a worker's log what the worker was doing at the log's end."""

    called: Called | None = None
    """Call that has not returned."""
    failed: e.HookFailed | None = None
    """First failure in the last step; None: no hook failed in the last step."""
    last: Called | None = None
    sequence: int = 0
    """Sequence number of the event of `failed` or, without a failure, of `last`."""

    def take(self, events: Iterable[SequencedEvent]) -> None:
        """Take the next events."""
        for sequence, event in events:
            if isinstance(event, e.HookFailed):
                if self.failed is None:
                    self.failed, self.sequence = event, sequence
                self.called = None
            elif isinstance(event, e.ExtensionNoted):
                self._take_payload(sequence, payload_of(event))

    def _take_payload(self, sequence: int, payload: object) -> None:
        if isinstance(payload, Called):
            if self.failed is not None and self.last is not None and payload.step > self.last.step:
                self.failed = None  # the worker survived the failure
            self.called = payload
            if self.failed is None:
                self.last, self.sequence = payload, sequence
        elif isinstance(payload, Returned):
            self.called = None

    def trouble(self, *, is_over: bool) -> str:
        """Return the hook in which the worker failed or which has not returned; empty if there is none.

        `is_over`: whether the log has ended.
        """
        called = self.called if self.failed is None else self.last
        if called is None:
            return ""
        step = "" if called.step < 0 else f" of step {called.step}"
        layer = f" for {called.layer}" if called.layer else ""
        where = f"{called.hook}{layer}{step}, event {self.sequence}"
        if self.failed is not None:
            return f"raised in {where}: {self.failed.error}"
        return f"never returned from {where}" if is_over else f"is in {where}"


def logs_of_workers(log: StoredLog) -> dict[int, Path]:
    """Return rank → log for the workers of this scheduler's log. Searches the same directory."""
    if not log.header.get("engine_id") or log.worker_rank is not None or not log.path.is_dir():
        return {}
    return workers_of(log.path)


def troubles_of_workers(log: StoredLog) -> dict[int, str]:
    """Return rank → what went wrong in this worker, and the name of its log. Workers without trouble are left out."""
    troubles = {}
    for rank, path in logs_of_workers(log).items():
        trouble = _trouble_in(path)
        if trouble:
            troubles[rank] = f"{trouble}, in {path.name}"
    return troubles


def _trouble_in(path: Path) -> str:
    is_over = not is_being_written(path)
    calls = WorkerCalls()
    try:
        for segment in segment_paths(path)[-2:]:  # the last segment may be empty
            calls.take(open_log(segment).events())
    except (CommandFailed, OSError) as error:
        return f"its log cannot be read ({error})"
    return calls.trouble(is_over=is_over)
