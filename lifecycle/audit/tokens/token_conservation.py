"""TOKEN_CONSERVATION: at admission every token is either local, loaded, or still to compute."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.audit.model.moment import on


class TokenConservation(Checker):
    """local + external + to compute == known tokens, and none of them is negative.

    Verifies: the first step after an allocation that claimed external tokens starts exactly behind local and
    external tokens, or computes the last one again where these are all (`v1/core/sched/scheduler.py`,
    _update_waiting_for_remote_kv, 0.32), unless a failed load, also of another request into blocks that it shares, or a
    rollback came between; counts of steps and lookups are not negative; progress that is recorded is the count that the
    steps fold to, of the tokens that they name, and says rightly whether tokens remain.
    Does not verify: later steps, where drafts are rejected and counts shrink without an event, and admissions
    that claimed nothing, whose local part the connector gets rounded to blocks.
    """

    rule = "TOKEN_CONSERVATION"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._admissions: dict[str, tuple[int, int, int]] = {}
        """Request id -> (sequence of the allocation, local tokens, external tokens), until a step starts from it."""
        model.forgotten.at((*LIFE, e.RequestPreempted, e.SessionContinued, e.RequestFinished), self._admissions)

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        if event.advanced:
            self._check_step(event)

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        if event.num_computed_tokens < 0 or event.num_external_tokens < 0 or event.num_hit_tokens < 0:
            self.broken("a lookup with a negative count", event.cause)

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        allocation = self.answers.allocation(event.request_id)
        answer = None if allocation is None else allocation.answer
        # Taking up more than was answered is ALLOC_MATCHES_LOOKUP's; nothing can be added up then.
        if answer is not None and 0 < event.num_external_tokens <= answer.num_external_tokens:
            admission = (self.moment.sequence, answer.num_computed_tokens, event.num_external_tokens)
            self._admissions[event.request_id] = admission

    @on(e.PrefillAdvanced, e.PrefillCompleted)
    def _progress(self, event: e.PrefillAdvanced | e.PrefillCompleted) -> None:
        life = self.moment.life
        if life is None:
            return
        counted = self.lives.num_computed_tokens(life)
        is_complete = event.num_computed_tokens >= event.num_tokens
        if event.num_computed_tokens != counted:
            detail = f"{event.id} tells {event.num_computed_tokens} computed tokens, the steps add up to {counted}"
        elif event.num_tokens != life.num_tokens:
            detail = f"{event.id} tells of {event.num_tokens} tokens, the steps of {life.num_tokens}"
        elif is_complete is not isinstance(event, e.PrefillCompleted):
            detail = f"{event.id} with {event.num_computed_tokens} of {event.num_tokens} tokens computed"
        else:
            return
        self.broken(detail, event.cause)

    @on(e.LoadFailed, e.TokensRolledBack)
    def _forget(self, event: e.RequestEvent) -> None:
        self._admissions.pop(event.request_id, None)

    @on(e.LoadErrorsObserved)
    def _load_errors_observed(self, event: e.LoadErrorsObserved) -> None:
        """VLLM takes back what a request counts on that waits for its own load, too (scheduler.py, 0.32)."""
        unfilled = frozenset(event.block_ids)
        for request_id in tuple(self._admissions):
            if not unfilled.isdisjoint(self.tables.held_by(self.lives.get(request_id))):
                del self._admissions[request_id]

    def _check_step(self, event: e.StepScheduled) -> None:
        for ordinal, num_computed_tokens, num_scheduled_tokens, num_tokens in event.advanced:
            life = self.lives.of(ordinal)
            if life is None:
                continue
            request_id = life.request_id
            if num_computed_tokens < 0 or num_scheduled_tokens < 0 or num_tokens < 0:
                detail = f"{num_scheduled_tokens} tokens scheduled on {num_computed_tokens} of {num_tokens} computed"
                self.broken(detail, request_id=request_id)
            if request_id not in self._admissions:
                continue
            sequence, num_local_tokens, num_external_tokens = self._admissions.pop(request_id)
            if num_computed_tokens != min(num_local_tokens + num_external_tokens, num_tokens - 1):
                detail = (
                    f"{num_local_tokens} local and {num_external_tokens} external tokens were admitted, "
                    f"but the step starts behind {num_computed_tokens}"
                )
                self.broken(detail, sequence, request_id=request_id)
