"""EXTERNAL_ZERO_NO_LOAD: an allocation that takes up nothing loads nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.replay import Check, ReplayedEvent


class ExternalZeroNoLoad:
    """`num_external_tokens == 0` means no load, and releases the pending answer.

    Verifies: every load follows an allocation of its request, in the same holding of blocks, that took up external
    tokens; each allocation causes at most one load; after any allocation no answer is pending.
    Does not verify: that tokens taken up are loaded (a load that is missing shows as a divergence).
    """

    rule: ClassVar[str] = "EXTERNAL_ZERO_NO_LOAD"

    def __init__(self) -> None:
        self._allocations: dict[str, tuple[int, int]] = {}
        """Request id -> (sequence, external tokens that no load has used) of the last allocation."""

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        model.forgotten.at((*LIFE, e.RequestPreempted), self._allocations)
        return [
            (e.BlocksAllocated, self._allocated),
            (e.LoadIssued, self._load_issued),
        ]

    def _allocated(
        self, event: e.BlocksAllocated, step: ReplayedEvent, projections: Projections
    ) -> list[Violation] | None:
        self._allocations[event.request_id] = (step.sequence, event.num_external_tokens)
        pending = projections.lookups.pending(event.request_id)
        if pending is None:
            return None
        detail = "blocks were allocated and the answer before is still pending"
        return [violation(self.rule, step, projections, detail, pending.sequence)]

    def _load_issued(
        self, event: e.LoadIssued, step: ReplayedEvent, projections: Projections
    ) -> list[Violation] | None:
        sequence, num_external_tokens = self._allocations.get(event.request_id, (0, 0))
        if num_external_tokens:
            self._allocations[event.request_id] = (sequence, 0)
            return None
        detail = f"load {event.job_id} of {event.num_tokens} tokens, but no allocation took up external tokens"
        return [violation(self.rule, step, projections, detail, sequence)]
