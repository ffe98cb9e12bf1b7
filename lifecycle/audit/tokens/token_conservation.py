"""TOKEN_CONSERVATION: at admission every token is either local, loaded, or still to compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.answers import Answers
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.audit.model.lives import Life, Lives
from kvledger.lifecycle.audit.model.moment import Check, Moment
from kvledger.lifecycle.audit.model.tables import Tables


class TokenConservation:
    """local + external + to compute == known tokens, and none of them is negative.

    Verifies: the first step after an allocation that took up external tokens starts exactly behind local and
    external tokens, or computes the last one again where these are all (`v1/core/sched/scheduler.py`,
    _update_waiting_for_remote_kv, 0.32), unless a failed load, also of another request into blocks that it shares, or a
    rollback came between; counts of steps and lookups are not negative; progress that is told is the count that the
    steps fold to, of the tokens that they told of, and tells rightly whether tokens remain.
    Does not verify: later steps, where drafts are rejected and counts shrink without an event, and admissions
    that took up nothing, whose local part the connector is told rounded to blocks.
    """

    rule: ClassVar[str] = "TOKEN_CONSERVATION"

    def __init__(self) -> None:
        self._lives: Lives
        self._tables: Tables
        self._answers: Answers
        self._admissions: dict[str, tuple[int, int, int]] = {}
        """Request id -> (sequence of the allocation, local tokens, external tokens), until a step starts from it."""

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._lives, self._tables, self._answers = model.lives, model.tables, model.answers
        model.forgotten.at((*LIFE, e.RequestPreempted, e.SessionContinued, e.RequestFinished), self._admissions)
        return [
            (e.StepScheduled, self._step_scheduled),
            (e.LookupAnswered, self._answered),
            (e.BlocksAllocated, self._allocated),
            (e.PrefillAdvanced, self._progress),
            (e.PrefillCompleted, self._progress),
            (e.LoadFailed, self._forget),
            (e.TokensRolledBack, self._forget),
            (e.LoadErrorsObserved, self._load_errors_observed),
        ]

    def _step_scheduled(self, event: e.StepScheduled, moment: Moment) -> Iterator[Violation] | None:
        return self._check_step(event, moment) if event.advanced else None

    def _answered(self, event: e.LookupAnswered, moment: Moment) -> list[Violation] | None:
        if event.num_computed_tokens >= 0 and event.num_external_tokens >= 0 and event.num_hit_tokens >= 0:
            return None
        return [violation(self.rule, moment, "a lookup with a negative count", event.cause)]

    def _allocated(self, event: e.BlocksAllocated, moment: Moment) -> None:
        allocation = self._answers.allocation(event.request_id)
        answer = None if allocation is None else allocation.answer
        # Taking up more than was answered is ALLOC_MATCHES_LOOKUP's; nothing can be added up then.
        if answer is not None and 0 < event.num_external_tokens <= answer.num_external_tokens:
            admission = (moment.sequence, answer.num_computed_tokens, event.num_external_tokens)
            self._admissions[event.request_id] = admission

    def _progress(self, event: e.PrefillAdvanced | e.PrefillCompleted, moment: Moment) -> Iterator[Violation] | None:
        is_complete = event.num_computed_tokens >= event.num_tokens
        if moment.life is None or (
            event.num_computed_tokens == self._lives.num_computed_tokens(moment.life)
            and event.num_tokens == moment.life.num_tokens
            and is_complete is isinstance(event, e.PrefillCompleted)
        ):
            return None
        return self._check_progress(event, moment.life, moment)

    def _forget(self, event: e.RequestEvent, _moment: Moment) -> None:
        self._admissions.pop(event.request_id, None)

    def _load_errors_observed(self, event: e.LoadErrorsObserved, moment: Moment) -> None:
        """VLLM takes back what a request counts on that waits for its own load, too (scheduler.py, 0.32)."""
        unfilled = frozenset(event.block_ids)
        for request_id in tuple(self._admissions):
            if not unfilled.isdisjoint(self._tables.held_by(self._lives.get(request_id))):
                del self._admissions[request_id]

    def _check_step(self, event: e.StepScheduled, moment: Moment) -> Iterator[Violation]:
        for ordinal, num_computed_tokens, num_scheduled_tokens, num_tokens in event.advanced:
            life = self._lives.of(ordinal)
            if life is None:
                continue
            request_id = life.request_id
            if num_computed_tokens < 0 or num_scheduled_tokens < 0 or num_tokens < 0:
                detail = f"{num_scheduled_tokens} tokens scheduled on {num_computed_tokens} of {num_tokens} computed"
                yield violation(self.rule, moment, detail, request_id=request_id)
            if request_id not in self._admissions:
                continue
            sequence, num_local_tokens, num_external_tokens = self._admissions.pop(request_id)
            if num_computed_tokens != min(num_local_tokens + num_external_tokens, num_tokens - 1):
                detail = (
                    f"{num_local_tokens} local and {num_external_tokens} external tokens were admitted, "
                    f"but the step starts behind {num_computed_tokens}"
                )
                yield violation(self.rule, moment, detail, sequence, request_id=request_id)

    def _check_progress(
        self, event: e.PrefillAdvanced | e.PrefillCompleted, life: Life, moment: Moment
    ) -> Iterator[Violation]:
        counted = self._lives.num_computed_tokens(life)
        complete = event.num_computed_tokens >= event.num_tokens
        if event.num_computed_tokens != counted:
            detail = f"{event.id} tells {event.num_computed_tokens} computed tokens, the steps add up to {counted}"
            yield violation(self.rule, moment, detail, event.cause)
        elif event.num_tokens != life.num_tokens:
            detail = f"{event.id} tells of {event.num_tokens} tokens, the steps of {life.num_tokens}"
            yield violation(self.rule, moment, detail, event.cause)
        elif complete is not isinstance(event, e.PrefillCompleted):
            detail = f"{event.id} with {event.num_computed_tokens} of {event.num_tokens} tokens computed"
            yield violation(self.rule, moment, detail, event.cause)
