"""When a worker began and ended a copy: in which step, in which hook, and in which order within the step.

The worker notes it, the log carries it, the audit judges it. Nothing is decided by it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple


class Hook(enum.IntEnum):
    """Hooks of a worker, in the order in which vLLM calls them in a step."""

    HANDLE_PREEMPTIONS = 0
    """Before everything else (`v1/worker/gpu_model_runner.py`, execute_model, and `v1/worker/gpu/kv_connector.py`,
    pre_forward, 0.32)."""
    START_LOAD_KV = 1
    """Before the forward if vLLM waits for a load in this step, else after it."""
    WAIT_FOR_SAVE = 2
    """After the forward."""
    OUTPUT = 3
    """Where vLLM collects what the worker reports."""
    UNREGISTER_KV_CACHES = 4
    """Before the engine sleeps (0.33)."""


class Moment(NamedTuple):
    """A point in the work of one worker. Moments of one worker compare in the order in which they came."""

    delivered: int
    """Sequence number of the last `EffectsDelivered` whose copies the worker had been given; 0 before the first."""
    number: int
    """Of the copies' begins and ends since then, counted from 1."""
    hook: int
    """A `Hook`."""

    @property
    def hook_name(self) -> str:
        """As vLLM calls it."""
        return Hook(self.hook).name.lower() if self.hook in Hook.__members__.values() else f"hook {self.hook}"


class CopyMoments(NamedTuple):
    """When a copy began, and from when on everything that the device is given comes after it."""

    began: Moment
    ended: Moment
    """When `PendingCopy.precede` or `result` returned, or when the copy was seen to be done, whichever came first."""

    def as_fields(self) -> tuple[int, ...]:
        """As `TransferReported` has it: delivered, number and hook of the begin; of the end, delivered as difference.

        Most copies end in the step in which they begin, so that the difference is 0 and takes one byte.
        """
        began, ended = self
        return (*began, ended.delivered - began.delivered, ended.number, ended.hook)

    @classmethod
    def of_fields(cls, fields: Sequence[int]) -> CopyMoments | None:
        """The moments of a report; None if they were not recorded."""
        if len(fields) != _NUM_FIELDS:
            return None
        began = Moment(*fields[:3])
        return cls(began, Moment(began.delivered + fields[3], *fields[4:]))


_NUM_FIELDS = 6
