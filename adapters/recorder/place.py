"""Finds out whether another connector, such as `MultiConnector`, holds the recorder.

vLLM does not pass this on. But its scheduler stores in each step what its own connector returned
(`v1/core/sched/scheduler.py`, schedule, 0.32), and a connector that holds others returns their metadata inside its own.
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
    """Whether the recorder is a child: known once the first step is scheduled, and so before the first report."""

    is_child: bool = attrs.field(default=False, init=False)
    """Whether another connector holds the recorder; False until known."""
    _is_known: bool = attrs.field(default=False, init=False)
    _last_step: tuple[SchedulerOutput, object] | None = attrs.field(default=None, init=False)
    """The last step and the metadata returned for it; None before a step and once the place is known."""

    def built(self, scheduler_output: SchedulerOutput, metadata: object) -> None:
        """Note what the recorder returned for a step."""
        if not self._is_known:
            self._last_step = scheduler_output, metadata

    def find_out(self) -> bool:
        """Whether this call has found out that another connector holds the recorder."""
        if self._last_step is None:
            return False
        scheduler_output, metadata = self._last_step
        stored = versions.connector_metadata(scheduler_output)
        if stored is None:  # vLLM has not stored it yet
            return False
        self._is_known, self._last_step = True, None
        self.is_child = not is_or_holds(stored, metadata)
        return self.is_child
