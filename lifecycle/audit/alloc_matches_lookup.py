"""ALLOC_MATCHES_LOOKUP: the scheduler takes up no more than it was answered, in the same life of the request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.tracker import RequestRecord
from kvledger.lifecycle.replay import Check, ReplayedEvent


class _Answer(msgspec.Struct, frozen=True, gc=False):
    sequence: int
    life: tuple[str, int, int]
    num_computed_tokens: int
    num_external_tokens: int


class AllocMatchesLookup:
    """At `blocks.allocated`, 0 <= external tokens <= the last answer, and the answer belongs to this generation.

    Verifies: an allocation that takes up external tokens follows an answer that no other allocation took up, that
    no preemption or reset overtook and that was given in the same generation; the tokens are at most those
    answered; a load reads exactly the tokens that were taken up, from where the answer began.
    Does not verify: whether the answer was right (LOOKUP_PURE), or still can be delivered (LOADABLE_AFTER_COMMIT).
    """

    rule: ClassVar[str] = "ALLOC_MATCHES_LOOKUP"

    def __init__(self) -> None:
        self._answers: dict[str, _Answer] = {}
        self._taken_up: dict[str, tuple[int, int, int]] = {}
        """Request id -> (sequence, first token, number of tokens) of the last allocation."""

    def begin(self, projections: Projections) -> None:
        """Take over the answers that no allocation has taken up."""
        for record in projections.tracker:
            pending = projections.lookups.pending(record.request_id)
            if pending is not None:
                self._answers[record.request_id] = _Answer(
                    pending.sequence,
                    (*record.life[:2], pending.generation),
                    pending.num_computed_tokens,
                    pending.num_external_tokens,
                )

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        model.forgotten.at(
            (*LIFE, e.RequestPreempted, e.SessionContinued, e.RequestFinished), self._answers, self._taken_up
        )
        return [
            (e.LookupAnswered, self._answered),
            (e.BlocksAllocated, self._allocated),
            (e.LoadIssued, self._check_load),
            (e.CacheReset, self._reset),
        ]

    def _answered(self, event: e.LookupAnswered, step: ReplayedEvent, _projections: Projections) -> None:
        self._answers[event.request_id] = _Answer(
            step.sequence,
            (event.request_id, event.ordinal, event.generation),
            event.num_computed_tokens,
            event.num_external_tokens,
        )

    def _reset(self, _event: e.CacheReset, _step: ReplayedEvent, _projections: Projections) -> None:
        self._answers.clear()

    def _allocated(
        self, event: e.BlocksAllocated, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation] | None:
        answer = self._answers.pop(event.request_id, None)
        first_token = 0 if answer is None else answer.num_computed_tokens
        self._taken_up[event.request_id] = (step.sequence, first_token, event.num_external_tokens)
        if event.num_external_tokens == 0 or step.record is None:
            return None
        return self._check_allocation(event, answer, step.record, step, projections)

    def _check_allocation(
        self,
        event: e.BlocksAllocated,
        answer: _Answer | None,
        record: RequestRecord,
        step: ReplayedEvent,
        projections: Projections,
    ) -> Iterator[Violation]:
        if answer is None:
            detail = f"{event.num_external_tokens} external tokens were taken up that no lookup answered"
            yield violation(self.rule, step, projections, detail)
        elif answer.life != record.life:
            detail = (
                f"{event.num_external_tokens} external tokens were taken up in generation {record.generation} of life "
                f"{record.ordinal}, the answer was for generation {answer.life[2]} of life {answer.life[1]}"
            )
            yield violation(self.rule, step, projections, detail, answer.sequence)
        elif not 0 <= event.num_external_tokens <= answer.num_external_tokens:
            detail = (
                f"{event.num_external_tokens} external tokens were taken up, "
                f"{answer.num_external_tokens} had been answered"
            )
            yield violation(self.rule, step, projections, detail, answer.sequence)

    def _check_load(self, event: e.LoadIssued, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        taken_up = self._taken_up.get(event.request_id)
        if taken_up is None or taken_up[2] == 0:
            return  # a load that nothing took up is EXTERNAL_ZERO_NO_LOAD's
        sequence, first_token, num_tokens = taken_up
        if (event.first_token, event.num_tokens) != (first_token, num_tokens):
            detail = (
                f"{event.num_tokens} tokens are loaded from token {event.first_token} on, "
                f"{num_tokens} from {first_token} on had been taken up"
            )
            yield violation(self.rule, step, projections, detail, sequence)
