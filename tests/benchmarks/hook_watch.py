"""What the scheduler's hooks of a connector take: CPU time, or calls.

Must not know which connector it watches, nor what is served.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial, wraps
from types import FrameType
from typing import Any

HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
)


class HookWatch:
    """Watches every hook of a scheduler's connector. Without a connector everything stays 0."""

    def __init__(self, connector: Any) -> None:
        self.counts_calls = False
        """Whether calls are counted instead of time. Counting takes time, so the two are never measured together."""
        self.longest_ns = 0
        """CPU time of the thread in the longest hook since `clear`, in nanoseconds."""
        self.most_calls = 0
        """Python and C calls in the hook that made the most of them since `clear`. The same code makes the same calls
        on every machine."""
        for name in HOOKS:
            if hasattr(connector, name):
                setattr(connector, name, self._watched(getattr(connector, name)))

    def clear(self) -> None:
        """Forget the hooks so far."""
        self.longest_ns = self.most_calls = 0

    def _watched(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(hook)
        def watched(*arguments: Any, **named: Any) -> Any:
            call = partial(hook, *arguments, **named)
            if not self.counts_calls:
                return self._timed(call)
            # What a hook calls is counted with it, other hooks included.
            return self._counted(call) if sys.getprofile() is None else call()

        return watched

    def _timed(self, call: Callable[[], Any]) -> Any:
        started = time.thread_time_ns()
        try:
            return call()
        finally:
            self.longest_ns = max(self.longest_ns, time.thread_time_ns() - started)

    def _counted(self, call: Callable[[], Any]) -> Any:
        num_calls = 0

        def count(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal num_calls
            num_calls += event in {"call", "c_call"}

        sys.setprofile(count)
        try:
            return call()
        finally:
            sys.setprofile(None)
            self.most_calls = max(self.most_calls, num_calls)
