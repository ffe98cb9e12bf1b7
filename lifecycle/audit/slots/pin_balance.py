"""PIN_BALANCE: nothing is kept for somebody who will not come for it."""

from __future__ import annotations

from collections import Counter

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import EventChecks, on

POOL_FULL = "pool_full"


class PinBalance(Checker):
    """A save is declined for want of room only where no chunk that nobody relies on could have made room.

    Verifies: this for every decline of `pool_full`, with what is promised, waited for, read and held as the audit
    follows it; a pin that its holder has left behind shows here, as soon as it costs somebody a save.
    Does not verify: pins that cost nobody anything; models with sliding windows, where what a chunk needs depends on
    what its windows see.
    """

    rule = "PIN_BALANCE"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._preempted = (0, 0)
        """Sequence and settled tokens of the last preemption: what is declined because of it may be a tail."""

    def checks(self) -> EventChecks:
        """None where a group has a window."""
        return [] if self.geometry.windows.forget else super().checks()

    @on(e.RequestPreempted)
    def _was_preempted(self, event: e.RequestPreempted) -> None:
        self._preempted = (self.moment.sequence, event.num_intact_tokens)

    @on(e.SaveDeclined)
    def _declined(self, event: e.SaveDeclined) -> None:
        if event.reason != POOL_FULL:
            return
        num_pages, num_free = self._num_pages(event), self.slots.num_free
        num_missing = num_pages - num_free
        if num_missing > 0 and not self._has_room(num_missing, event.request_id):
            return
        detail = (
            f"chunk {event.first_chunk} was declined for want of {num_pages} slots, but {num_free} were free"
            f"{', and chunks that nobody relies on could have made room' if num_missing > 0 else ''}"
        )
        self.broken(detail, event.cause)

    def _has_room(self, num_missing: int, request_id: str) -> bool:
        """Whether so many slots are needed for nothing but chunks that could be evicted."""
        model = self.model
        life = model.lives.get(request_id)
        own = frozenset(() if life is None else life.keys)
        relied_on = model.promises.relied_on()
        read = {slot for job_id in model.jobs.loads if (job := model.jobs.get(job_id)) for slot in job.slots}
        freed: Counter[int] = Counter()
        for key, slots in model.chunks.committed.items():
            if key in own or key in relied_on or not read.isdisjoint(slots):
                continue
            freed.update(slots)
            num_missing -= sum([freed[slot] == model.slots.num_holders(slot) for slot in slots])
            if num_missing <= 0:
                return True
        return False

    def _num_pages(self, event: e.SaveDeclined) -> int:
        geometry = self.geometry
        sequence, num_settled_tokens = self._preempted
        first_token = event.first_chunk * geometry.chunk_size
        if event.cause == sequence and geometry.num_chunks_in(num_settled_tokens) == event.first_chunk:
            return len(geometry.pages_spanning(first_token, num_settled_tokens - first_token))
        return len(geometry.pages_of((event.first_chunk,)))
