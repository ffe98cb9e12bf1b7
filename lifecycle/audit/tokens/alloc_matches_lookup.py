"""ALLOC_MATCHES_LOOKUP: the scheduler claims no more than it was answered, in the same life of the request."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model.answers import Answer
from kvledger.lifecycle.audit.model.lives import Life
from kvledger.lifecycle.audit.model.moment import on


class AllocMatchesLookup(Checker):
    """At `blocks.allocated`, 0 <= external tokens <= the last answer, and the answer belongs to this generation.

    Verifies: an allocation that claims external tokens follows an answer that no other allocation claimed, that
    no preemption or reset overtook and that was given in the same generation; the tokens are at most those
    answered; a load reads exactly the tokens that were claimed, from where the answer began, asynchronously if and
    only if it was answered so: vLLM schedules a request at once or waits for the report, whatever the load does.
    Does not verify: whether the answer was right (LOOKUP_PURE), or still can be delivered (LOADABLE_AFTER_COMMIT).
    """

    rule = "ALLOC_MATCHES_LOOKUP"

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        allocation = self.answers.allocation(event.request_id)
        if event.num_external_tokens and self.moment.life is not None and allocation is not None:
            self._check_allocation(event, allocation.answer, self.moment.life)

    def _check_allocation(self, event: e.BlocksAllocated, answer: Answer | None, life: Life) -> None:
        if answer is None:
            self.broken(f"{event.num_external_tokens} external tokens were claimed that no lookup answered")
        elif answer.life != life.name:
            detail = (
                f"{event.num_external_tokens} external tokens were claimed in generation {life.generation} of life "
                f"{life.ordinal}, the answer was for generation {answer.life[2]} of life {answer.life[1]}"
            )
            self.broken(detail, answer.sequence)
        elif not 0 <= event.num_external_tokens <= answer.num_external_tokens:
            detail = (
                f"{event.num_external_tokens} external tokens were claimed, "
                f"{answer.num_external_tokens} had been answered"
            )
            self.broken(detail, answer.sequence)

    @on(e.LoadIssued)
    def _check_load(self, event: e.LoadIssued) -> None:
        allocation = self.answers.allocation(event.request_id)
        if allocation is None or allocation.num_external_tokens == 0:
            return  # a load that nothing claimed is EXTERNAL_ZERO_NO_LOAD's
        answer = allocation.answer
        first_token = 0 if answer is None else answer.num_computed_tokens
        if (event.first_token, event.num_tokens) != (first_token, allocation.num_external_tokens):
            detail = (
                f"{event.num_tokens} tokens are loaded from token {event.first_token} on, "
                f"{allocation.num_external_tokens} from {first_token} on had been claimed"
            )
            self.broken(detail, allocation.sequence)
        if answer is not None and event.is_async is not answer.is_async:
            how = ("a load within its step", "an asynchronous load")
            detail = f"{how[event.is_async]} was issued, {how[answer.is_async]} had been answered"
            self.broken(detail, answer.sequence, allocation.sequence)
