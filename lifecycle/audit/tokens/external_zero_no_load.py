"""EXTERNAL_ZERO_NO_LOAD: an allocation that claims nothing loads nothing."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.audit.model.moment import on


class ExternalZeroNoLoad(Checker):
    """`num_external_tokens == 0` means no load, and releases the pending answer.

    Verifies: every load follows an allocation of its request, in the same holding of blocks, that claimed external
    tokens; each allocation causes at most one load.
    Does not verify: that tokens claimed are loaded (a load that is missing shows as a divergence); that an answer is
    used once (ALLOC_MATCHES_LOOKUP).
    """

    rule = "EXTERNAL_ZERO_NO_LOAD"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._used: dict[str, int] = {}
        """Request id -> sequence of the last allocation that a load has used."""
        model.forgotten.at((*LIFE, e.RequestPreempted), self._used)

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued) -> None:
        allocation = self.answers.allocation(event.request_id)
        sequence = 0 if allocation is None else allocation.sequence
        is_taken_up = allocation is not None and allocation.num_external_tokens > 0
        if is_taken_up and self._used.get(event.request_id) != sequence:
            self._used[event.request_id] = sequence
            return
        detail = f"load {event.job_id} of {event.num_tokens} tokens, but no allocation claimed external tokens"
        self.broken(detail, sequence)
