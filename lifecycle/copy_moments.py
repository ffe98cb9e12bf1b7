"""Moments at which a worker began and ended a copy: the step, the hook, and the order within the step.

Workers record them, the log contains them, and the audit checks them. No decision depends on them.
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
    """Before the forward pass if vLLM waits for a load in this step, else after it."""
    WAIT_FOR_SAVE = 2
    """After the forward pass."""
    OUTPUT = 3
    """When vLLM collects the worker's reports."""
    UNREGISTER_KV_CACHES = 4
    """Before the engine sleeps (0.33)."""


class Moment(NamedTuple):
    """A point in the work of one worker. Moments of one worker compare in their order in time."""

    delivered: int
    """Sequence number of the last `EffectsDelivered` whose copies the worker had received; 0 before the first."""
    number: int
    """Number of this begin or end of a copy since then, from 1."""
    hook: int
    """A `Hook`."""

    @property
    def hook_name(self) -> str:
        """The hook's name in vLLM."""
        return Hook(self.hook).name.lower() if self.hook in Hook.__members__.values() else f"hook {self.hook}"


class CopyMoments(NamedTuple):
    """When a copy began, and from when on everything given to the device runs after it."""

    began: Moment
    ended: Moment
    """When `PendingCopy.precede` or `result` returned, or when the copy was seen to be done, whichever came first."""

    def as_fields(self) -> tuple[int, ...]:
        """Return the fields of `TransferReported.moments`: delivered, number and hook of the begin, then of the end.

        `delivered` of the end is a difference. It is mostly 0, which takes one byte.
        """
        began, ended = self
        return (*began, ended.delivered - began.delivered, ended.number, ended.hook)

    @classmethod
    def of_fields(cls, fields: Sequence[int]) -> CopyMoments | None:
        """Return the moments of a report; None if they were not recorded."""
        if len(fields) != _NUM_FIELDS:
            return None
        began = Moment(*fields[:3])
        return cls(began, Moment(began.delivered + fields[3], *fields[4:]))


_NUM_FIELDS = 6
