"""LAST_TOKEN: a load always leaves the last token to compute, for the engine needs its logits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.replay import Check, ReplayedEvent


class LastToken:
    """Loaded and locally cached tokens together are at most `num_tokens - 1`.

    Verifies: this for every answer that takes a hit of all known tokens as it is, for every load against the tokens
    known then, and for the first step after an allocation: at least one token is left to compute.
    Does not verify: that the engine computed it.
    """

    rule: ClassVar[str] = "LAST_TOKEN"

    def __init__(self) -> None:
        self._admitted: dict[int, int] = {}
        """Ordinal -> sequence of an allocation that no step has used yet."""

    def checks(self, _model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        return [
            (e.StepScheduled, self._step_scheduled),
            (e.LookupAnswered, self._answered),
            (e.BlocksAllocated, self._allocated),
            (e.LoadIssued, self._load_issued),
            (e.RequestPreempted, self._forget),
            (e.RequestReleased, self._forget),
        ]

    def _step_scheduled(
        self, event: e.StepScheduled, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation] | None:
        return self._check_step(event, step, projections) if self._admitted else None

    def _answered(
        self, event: e.LookupAnswered, step: ReplayedEvent, projections: Projections
    ) -> list[Violation] | None:
        if not event.num_computed_tokens + event.num_external_tokens == event.num_tokens <= event.num_hit_tokens:
            return None
        detail = f"all of the {event.num_tokens} tokens are answered, the last one must be computed"
        return [violation(self.rule, step, projections, detail, event.cause)]

    def _allocated(self, _event: e.BlocksAllocated, step: ReplayedEvent, projections: Projections) -> None:
        if step.record is None:
            self._forget_released(projections)
        else:
            self._admitted[step.record.ordinal] = step.sequence

    def _load_issued(
        self, event: e.LoadIssued, step: ReplayedEvent, projections: Projections
    ) -> list[Violation] | None:
        if step.record is None:
            self._forget_released(projections)
            return None
        end_token, num_tokens = event.first_token + event.num_tokens, step.record.num_tokens
        if end_token <= num_tokens - 1:
            return None
        detail = f"the load fills tokens up to {end_token}, of {num_tokens} the last one must be computed"
        return [violation(self.rule, step, projections, detail, event.cause)]

    def _forget(self, _event: e.RequestEvent, step: ReplayedEvent, projections: Projections) -> None:
        if step.record is None:
            self._forget_released(projections)
        else:
            self._admitted.pop(step.record.ordinal, None)

    def _forget_released(self, projections: Projections) -> None:
        if self._admitted:
            known = projections.tracker.of
            self._admitted = {ordinal: at for ordinal, at in self._admitted.items() if known(ordinal) is not None}

    def _check_step(self, event: e.StepScheduled, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        for ordinal, num_computed_tokens, _, num_tokens in event.advanced:
            sequence = self._admitted.pop(ordinal, None)
            record = projections.tracker.of(ordinal)
            if sequence is not None and record is not None and num_computed_tokens > num_tokens - 1:
                detail = f"the request starts with {num_computed_tokens} of {num_tokens} tokens computed"
                yield violation(self.rule, step, projections, detail, sequence, request_id=record.request_id)
