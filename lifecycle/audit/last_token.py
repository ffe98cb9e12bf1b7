"""LAST_TOKEN: a load always leaves the last token to compute, for the engine needs its logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.replay import ReplayedEvent


class LastToken:
    """Loaded and locally cached tokens together are at most `num_tokens - 1`.

    Verifies: this for every answer that takes a hit of all known tokens as it is, for every load against the tokens
    known then, and for the first step after an allocation: at least one token is left to compute.
    Does not verify: that the engine computed it.
    """

    rule: ClassVar[str] = "LAST_TOKEN"
    looks_at: ClassVar[frozenset[type[e.Event]]] = frozenset(
        {
            e.LookupAnswered,
            e.BlocksAllocated,
            e.LoadIssued,
            e.StepScheduled,
            e.RequestArrived,
            e.RequestPreempted,
            e.RequestReleased,
        }
    )

    def __init__(self) -> None:
        self._admitted: dict[int, int] = {}
        """Ordinal -> sequence of an allocation that no step has used yet."""

    def check(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        """Count what is left to compute."""
        event = step.event
        if isinstance(event, e.StepScheduled):
            if self._admitted:
                yield from self._check_step(event, step, projections)
        elif isinstance(event, e.LookupAnswered):
            if event.num_computed_tokens + event.num_external_tokens == event.num_tokens <= event.num_hit_tokens:
                detail = f"all of the {event.num_tokens} tokens are answered, the last one must be computed"
                yield violation(self.rule, step, projections, detail, event.cause)
        elif isinstance(event, e.RequestEvent):
            yield from self._check_request(event, step, projections)

    def _check_request(
        self, event: e.RequestEvent, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation]:
        record = projections.tracker.get(event.request_id)
        if record is None:
            if self._admitted:
                known = projections.tracker.by_ordinal
                self._admitted = {ordinal: at for ordinal, at in self._admitted.items() if known(ordinal) is not None}
        elif isinstance(event, e.BlocksAllocated):
            self._admitted[record.ordinal] = step.sequence
        elif isinstance(event, e.LoadIssued):
            if event.first_token + event.num_tokens > record.num_tokens - 1:
                detail = (
                    f"the load fills tokens up to {event.first_token + event.num_tokens}, "
                    f"of {record.num_tokens} the last one must be computed"
                )
                yield violation(self.rule, step, projections, detail, event.cause)
        else:
            self._admitted.pop(record.ordinal, None)

    def _check_step(self, event: e.StepScheduled, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        for ordinal, num_computed_tokens, _, num_tokens in event.advanced:
            sequence = self._admitted.pop(ordinal, None)
            record = projections.tracker.by_ordinal(ordinal)
            if sequence is not None and record is not None and num_computed_tokens > num_tokens - 1:
                detail = f"the request starts with {num_computed_tokens} of {num_tokens} tokens computed"
                yield violation(self.rule, step, projections, detail, sequence, request_id=record.request_id)
