"""LAST_TOKEN: a load always leaves the last token to compute, for the engine needs its logits."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.audit.model.moment import on


class LastToken(Checker):
    """Loaded and locally cached tokens together are at most `num_tokens - 1`.

    Verifies: this for every answer that takes a hit of all known tokens as it is, for every load against the tokens
    known then, and for the first step after an allocation: at least one token is left to compute.
    Does not verify: that the engine computed it.
    """

    rule = "LAST_TOKEN"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._admitted: dict[str, int] = {}
        """Request id -> sequence of an allocation that no step has used yet."""
        model.forgotten.at((*LIFE, e.RequestPreempted), self._admitted)

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        if self._admitted:
            self._check_step(event)

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        if event.num_computed_tokens + event.num_external_tokens == event.num_tokens <= event.num_hit_tokens:
            detail = f"all of the {event.num_tokens} tokens are answered, the last one must be computed"
            self.broken(detail, event.cause)

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        if self.moment.life is not None:
            self._admitted[event.request_id] = self.moment.sequence

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued) -> None:
        life, end_token = self.moment.life, event.first_token + event.num_tokens
        if life is not None and end_token > life.num_tokens - 1:
            detail = f"the load fills tokens up to {end_token}, of {life.num_tokens} the last one must be computed"
            self.broken(detail, event.cause)

    def _check_step(self, event: e.StepScheduled) -> None:
        for ordinal, num_computed_tokens, _, num_tokens in event.advanced:
            life = self.lives.of(ordinal)
            sequence = None if life is None else self._admitted.pop(life.request_id, None)
            if sequence is not None and life is not None and num_computed_tokens > num_tokens - 1:
                detail = f"the request starts with {num_computed_tokens} of {num_tokens} tokens computed"
                self.broken(detail, sequence, request_id=life.request_id)
