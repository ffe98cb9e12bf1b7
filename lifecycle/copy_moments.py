"""Moments at which a worker began and ended a copy: the step, the hook, and the order within the step.

Workers record moments, the log contains them, and audits check them. No decision depends on a moment.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple


class Hook(enum.IntEnum):
    """Hooks of a worker, in the order in which vLLM calls them in a step."""

    HANDLE_PREEMPTIONS = 0
    """Called before everything else in a step (`v1/worker/gpu_model_runner.py`, execute_model, and
    `v1/worker/gpu/kv_connector.py`, pre_forward, 0.32)."""
    START_LOAD_KV = 1
    """Called before the forward pass if vLLM waits for a load in this step, otherwise after the forward pass."""
    WAIT_FOR_SAVE = 2
    """Called after the forward pass."""
    OUTPUT = 3
    """Called when vLLM collects the worker's reports."""
    UNREGISTER_KV_CACHES = 4
    """Called before the engine sleeps (0.33)."""


class Moment(NamedTuple):
    """A point in the work of one worker. The earlier of two moments of one worker compares as the smaller one."""

    delivered: int
    """Sequence number of the last `EffectsDelivered` whose copies the worker had received; 0 if there was none."""
    number: int
    """Number of this moment among the worker's moments with the same `delivered`, from 1."""
    hook: int
    """The `Hook` in which the worker was."""

    @property
    def hook_name(self) -> str:
        """The hook's name in vLLM."""
        return Hook(self.hook).name.lower() if self.hook in Hook.__members__.values() else f"hook {self.hook}"


class CopyMoments(NamedTuple):
    """When a copy began, and when it ended. Work that is given to the device after `ended` runs after the copy."""

    began: Moment
    ended: Moment
    """When `PendingCopy.precede` or `PendingCopy.result` returned, or when the worker saw that the copy was done.

    The earliest of these moments counts.
    """

    def as_fields(self) -> tuple[int, ...]:
        """Return `delivered`, `number` and `hook` of `began`, and then of `ended`, for `TransferReported.moments`.

        The second `delivered` is stored as its difference from the first one. This is mostly 0, which takes one byte.
        """
        began, ended = self
        return (*began, ended.delivered - began.delivered, ended.number, ended.hook)

    @classmethod
    def of_fields(cls, fields: Sequence[int]) -> CopyMoments | None:
        """Return the moments from the fields of a `TransferReported.moments`; None if no moments were recorded."""
        if len(fields) != _NUM_FIELDS:
            return None
        began = Moment(*fields[:3])
        return cls(began, Moment(began.delivered + fields[3], *fields[4:]))


_NUM_FIELDS = 6
