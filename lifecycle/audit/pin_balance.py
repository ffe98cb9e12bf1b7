"""PIN_BALANCE: nothing is kept for somebody who will not come for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.replay import ReplayedEvent

POOL_FULL = "pool_full"


class PinBalance:
    """A save is declined for want of room only where no chunk that nobody relies on could have made room.

    Verifies: this for every decline of `pool_full`, with what is promised, waited for and read as the log folds to it;
    a pin that its holder has left behind shows here, as soon as it costs somebody a save.
    Does not verify: pins that cost nobody anything; models with sliding windows, where what a chunk needs depends on
    what its windows see.
    """

    rule: ClassVar[str] = "PIN_BALANCE"
    looks_at: ClassVar[frozenset[type[e.Event]]] = frozenset({e.SaveDeclined, e.RequestPreempted})

    def __init__(self) -> None:
        self._preempted = (0, 0)
        """Sequence and settled tokens of the last preemption: what is declined because of it may be a tail."""

    def check(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        """Look for room."""
        event = step.event
        if isinstance(event, e.RequestPreempted):
            self._preempted = (step.sequence, event.num_settled_tokens)
        elif (
            isinstance(event, e.SaveDeclined) and event.reason == POOL_FULL and not projections.geometry.windows.forget
        ):
            num_pages = self._num_pages(event, projections)
            slots = projections.chunks.slots
            spare = frozenset(projections.chunk_keys.of(event.request_id))
            victims = projections.chunks.room_for(num_pages - slots.num_free, spare)
            if victims is not None:
                detail = (
                    f"chunk {event.first_chunk} was declined for want of {num_pages} slots, but {slots.num_free} were "
                    f"free and {len(victims)} chunks that nobody relies on could have made room"
                )
                yield violation(self.rule, step, projections, detail, event.cause)

    def _num_pages(self, event: e.SaveDeclined, projections: Projections) -> int:
        geometry = projections.geometry
        sequence, num_settled_tokens = self._preempted
        first_token = event.first_chunk * geometry.chunk_size
        if event.cause == sequence and geometry.num_chunks_in(num_settled_tokens) == event.first_chunk:
            return len(geometry.pages_spanning(first_token, num_settled_tokens - first_token))
        return len(geometry.pages_of((event.first_chunk,)))
