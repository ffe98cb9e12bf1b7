"""EXTERNAL_ZERO_NO_LOAD: an allocation that takes up nothing loads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.replay import ReplayedEvent


class ExternalZeroNoLoad:
    """`num_external_tokens == 0` means no load, and releases the pending answer.

    Verifies: every load follows an allocation of its request, in the same holding of blocks, that took up external
    tokens; each allocation causes at most one load; after any allocation no answer is pending.
    Does not verify: that tokens taken up are loaded (a load that is missing shows as a divergence).
    """

    rule: ClassVar[str] = "EXTERNAL_ZERO_NO_LOAD"
    looks_at: ClassVar[frozenset[type[e.Event]]] = frozenset(
        {e.BlocksAllocated, e.LoadIssued, e.RequestArrived, e.RequestPreempted, e.RequestReleased}
    )

    def __init__(self) -> None:
        self._allocations: dict[str, tuple[int, int]] = {}
        """Request id -> (sequence, external tokens that no load has used) of the last allocation."""

    def check(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        """Compare each load with the allocation before it."""
        event = step.event
        if isinstance(event, e.BlocksAllocated):
            self._allocations[event.request_id] = (step.sequence, event.num_external_tokens)
            pending = projections.lookups.pending(event.request_id)
            if pending is not None:
                detail = "blocks were allocated and the answer before is still pending"
                yield violation(self.rule, step, projections, detail, pending.sequence)
        elif isinstance(event, e.LoadIssued):
            sequence, num_external_tokens = self._allocations.get(event.request_id, (0, 0))
            if not num_external_tokens:
                detail = f"load {event.job_id} of {event.num_tokens} tokens, but no allocation took up external tokens"
                yield violation(self.rule, step, projections, detail, sequence)
            else:
                self._allocations[event.request_id] = (sequence, 0)
        elif isinstance(event, e.RequestEvent):
            self._allocations.pop(event.request_id, None)
