"""LAST_TOKEN: a load always leaves the last token to compute, for the engine needs its logits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.audit.model.lives import Lives
from kvledger.lifecycle.audit.model.moment import Check, Moment


class LastToken:
    """Loaded and locally cached tokens together are at most `num_tokens - 1`.

    Verifies: this for every answer that takes a hit of all known tokens as it is, for every load against the tokens
    known then, and for the first step after an allocation: at least one token is left to compute.
    Does not verify: that the engine computed it.
    """

    rule: ClassVar[str] = "LAST_TOKEN"

    def __init__(self) -> None:
        self._lives: Lives
        self._admitted: dict[str, int] = {}
        """Request id -> sequence of an allocation that no step has used yet."""

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._lives = model.lives
        model.forgotten.at((*LIFE, e.RequestPreempted), self._admitted)
        return [
            (e.StepScheduled, self._step_scheduled),
            (e.LookupAnswered, self._answered),
            (e.BlocksAllocated, self._allocated),
            (e.LoadIssued, self._load_issued),
        ]

    def _step_scheduled(self, event: e.StepScheduled, moment: Moment) -> Iterator[Violation] | None:
        return self._check_step(event, moment) if self._admitted else None

    def _answered(self, event: e.LookupAnswered, moment: Moment) -> list[Violation] | None:
        if not event.num_computed_tokens + event.num_external_tokens == event.num_tokens <= event.num_hit_tokens:
            return None
        detail = f"all of the {event.num_tokens} tokens are answered, the last one must be computed"
        return [violation(self.rule, moment, detail, event.cause)]

    def _allocated(self, event: e.BlocksAllocated, moment: Moment) -> None:
        if moment.life is not None:
            self._admitted[event.request_id] = moment.sequence

    def _load_issued(self, event: e.LoadIssued, moment: Moment) -> list[Violation] | None:
        if moment.life is None:
            return None
        end_token, num_tokens = event.first_token + event.num_tokens, moment.life.num_tokens
        if end_token <= num_tokens - 1:
            return None
        detail = f"the load fills tokens up to {end_token}, of {num_tokens} the last one must be computed"
        return [violation(self.rule, moment, detail, event.cause)]

    def _check_step(self, event: e.StepScheduled, moment: Moment) -> Iterator[Violation]:
        for ordinal, num_computed_tokens, _, num_tokens in event.advanced:
            life = self._lives.of(ordinal)
            sequence = None if life is None else self._admitted.pop(life.request_id, None)
            if sequence is not None and life is not None and num_computed_tokens > num_tokens - 1:
                detail = f"the request starts with {num_computed_tokens} of {num_tokens} tokens computed"
                yield violation(self.rule, moment, detail, sequence, request_id=life.request_id)
