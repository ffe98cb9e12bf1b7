"""Finds out whether another connector, such as `MultiConnector`, contains the recorder.

vLLM does not tell a connector this. In each step, however, vLLM's scheduler stores the metadata that its own connector
returned (`v1/core/sched/scheduler.py`, schedule, 0.32). A connector that contains other connectors returns their
metadata inside its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvledger.adapters.recorder.page_digests import is_or_holds
from kvledger.adapters.vllm import versions

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@attrs.define
class Place:
    """Whether the recorder is a child of another connector.

    This is known as soon as the first step is scheduled, and therefore before the first report.
    """

    is_child: bool = attrs.field(default=False, init=False)
    """Whether another connector contains the recorder. False also if this is not known yet."""
    _is_known: bool = attrs.field(default=False, init=False)
    _last_step: tuple[SchedulerOutput, object] | None = attrs.field(default=None, init=False)
    """The last step and the metadata that the recorder returned for it. None before the first step, and as soon as
    `is_child` is known."""

    def built(self, scheduler_output: SchedulerOutput, metadata: object) -> None:
        """Note the metadata that the recorder returned for a step."""
        if not self._is_known:
            self._last_step = scheduler_output, metadata

    def find_out(self) -> bool:
        """Find out whether the recorder is a child.

        Returns True only in the call that finds out that the recorder is a child.
        """
        if self._last_step is None:
            return False
        scheduler_output, metadata = self._last_step
        stored = versions.connector_metadata(scheduler_output)
        if stored is None:  # vLLM has not stored it yet
            return False
        self._is_known, self._last_step = True, None
        self.is_child = not is_or_holds(stored, metadata)
        return self.is_child
