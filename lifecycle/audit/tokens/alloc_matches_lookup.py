"""ALLOC_MATCHES_LOOKUP: the scheduler takes up no more than it was answered, in the same life of the request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.answers import Answer, Answers
from kvledger.lifecycle.audit.model.lives import Life
from kvledger.lifecycle.audit.model.moment import Check, Moment


class AllocMatchesLookup:
    """At `blocks.allocated`, 0 <= external tokens <= the last answer, and the answer belongs to this generation.

    Verifies: an allocation that takes up external tokens follows an answer that no other allocation took up, that
    no preemption or reset overtook and that was given in the same generation; the tokens are at most those
    answered; a load reads exactly the tokens that were taken up, from where the answer began, beside the steps if and
    only if it was answered so: vLLM schedules a request at once or waits for the report, whatever the load does.
    Does not verify: whether the answer was right (LOOKUP_PURE), or still can be delivered (LOADABLE_AFTER_COMMIT).
    """

    rule: ClassVar[str] = "ALLOC_MATCHES_LOOKUP"

    _answers: Answers

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._answers = model.answers
        return [(e.BlocksAllocated, self._allocated), (e.LoadIssued, self._check_load)]

    def _allocated(self, event: e.BlocksAllocated, moment: Moment) -> Iterator[Violation] | None:
        allocation = self._answers.allocation(event.request_id)
        if event.num_external_tokens == 0 or moment.life is None or allocation is None:
            return None
        return self._check_allocation(event, allocation.answer, moment.life, moment)

    def _check_allocation(
        self, event: e.BlocksAllocated, answer: Answer | None, life: Life, moment: Moment
    ) -> Iterator[Violation]:
        if answer is None:
            detail = f"{event.num_external_tokens} external tokens were taken up that no lookup answered"
            yield violation(self.rule, moment, detail)
        elif answer.life != life.name:
            detail = (
                f"{event.num_external_tokens} external tokens were taken up in generation {life.generation} of life "
                f"{life.ordinal}, the answer was for generation {answer.life[2]} of life {answer.life[1]}"
            )
            yield violation(self.rule, moment, detail, answer.sequence)
        elif not 0 <= event.num_external_tokens <= answer.num_external_tokens:
            detail = (
                f"{event.num_external_tokens} external tokens were taken up, "
                f"{answer.num_external_tokens} had been answered"
            )
            yield violation(self.rule, moment, detail, answer.sequence)

    def _check_load(self, event: e.LoadIssued, moment: Moment) -> Iterator[Violation]:
        allocation = self._answers.allocation(event.request_id)
        if allocation is None or allocation.num_external_tokens == 0:
            return  # a load that nothing took up is EXTERNAL_ZERO_NO_LOAD's
        answer = allocation.answer
        first_token = 0 if answer is None else answer.num_computed_tokens
        if (event.first_token, event.num_tokens) != (first_token, allocation.num_external_tokens):
            detail = (
                f"{event.num_tokens} tokens are loaded from token {event.first_token} on, "
                f"{allocation.num_external_tokens} from {first_token} on had been taken up"
            )
            yield violation(self.rule, moment, detail, allocation.sequence)
        if answer is not None and event.is_async is not answer.is_async:
            how = ("within its step", "beside the steps")
            detail = f"a load {how[event.is_async]} was issued, one {how[answer.is_async]} had been answered"
            yield violation(self.rule, moment, detail, answer.sequence, allocation.sequence)
