"""Evictions: what stays in the host pool for whom, and how long."""

from __future__ import annotations

from collections import Counter

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.jobs import InFlight, Settled
from kvledger.lifecycle.audit.model.moment import EventChecks, num_intact_tokens
from kvledger.lifecycle.audit.model.start import Start
from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.marks import on


class EvictIdleOnly(Checker):
    """EVICT_IDLE_ONLY: a chunk that a load reads is not evicted.

    No load in flight reads the slots that an evicted chunk gives up.

    Verifies: this for every eviction, with slots folded from saves and loads.
    Does not verify: taints and resets, which take chunks away from whoever reads them by design; chunks that were
    promised and not claimed yet (HIT_PINNED).
    """

    rule = "EVICT_IDLE_ONLY"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._loads: dict[int, tuple[int, set[bytes]]] = {}
        """Job id -> (sequence of the load, keys of the chunks whose slots it reads)."""

    def begin(self, _start: Start) -> None:
        """Take over what loads in flight read."""
        for job_id, job in self.jobs:
            if job.is_load:
                self._loads[job_id] = (0, self._keys_read_by(job))

    @on(e.ChunkEvicted)
    def _evicted(self, event: e.ChunkEvicted) -> None:
        for job_id, (sequence, read) in self._loads.items():
            if event.key in read:
                detail = f"chunk {event.key.hex()} was evicted, though load {job_id} is still reading it"
                self.broken(detail, sequence, event.cause)

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued) -> None:
        if self.jobs.current is not None:
            self._loads[event.job_id] = (self.moment.sequence, self._keys_read_by(self.jobs.current))

    def _keys_read_by(self, load: InFlight) -> set[bytes]:
        # A chunk may also lie in a shorter image of the same block; the load does not read that one.
        read = frozenset(load.slots) - {NO_SLOT}
        return {key for key in load.keys if not read.isdisjoint(self.chunks.slots_of(key) or ())}

    @on(Settled)
    def _settled(self, event: Settled) -> None:
        self._loads.pop(event.job_id, None)
        job = self.jobs.current
        if job is not None and not job.is_load:
            # Chunks of a settled save may have moved to a longer image; loads in flight still read the shorter.
            for _, keys in self._loads.values():
                keys.difference_update(job.keys, (key for _, key in job.earlier_keys))


class HitPinned(Checker):
    """HIT_PINNED: what a lookup promised is there until the scheduler has taken it up.

    No chunk that the pending answer to a request promised is evicted.

    Verifies: this for every eviction, with promises folded from lookups, allocations and ends.
    Does not verify: taints and resets, which take chunks away from whoever relies on them by design.
    """

    rule = "HIT_PINNED"

    @on(e.ChunkEvicted)
    def _evicted(self, event: e.ChunkEvicted) -> None:
        for request_id, sequence in self.answers.promised(event.key):
            detail = f"chunk {event.key.hex()} was evicted, though the pending answer to {request_id!r} promised it"
            self.broken(detail, sequence, event.cause, request_id=request_id)


class WaitingKept(Checker):
    """WAITING_KEPT: what a preempted request will come back for is not evicted.

    From its preemption until it has blocks again or ends, no whole chunk that a request had computed is evicted.

    Verifies: this for every eviction, where the configuration keeps for the preempted (decision 0009): a save that
    would need the room is declined.
    Does not verify: what the request was promised already (HIT_PINNED); in which order the others are evicted; chunks
    that were tainted or are from before a reset.
    """

    rule = "WAITING_KEPT"

    @on(e.ChunkEvicted)
    def _evicted(self, event: e.ChunkEvicted) -> None:
        for request_id, sequence in self.answers.waited_for(event.key):
            if all(request_id != whose for whose, _ in self.answers.promised(event.key)):
                detail = f"chunk {event.key.hex()} was evicted, though {request_id!r} was preempted and waits for it"
                self.broken(detail, sequence, event.cause, request_id=request_id)


POOL_FULL = "pool_full"


class PinBalance(Checker):
    """PIN_BALANCE: nothing is kept for somebody who will not come for it.

    A save is declined for want of room only where no chunk that nobody relies on could have made room.

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
        return [] if self.spans.has_windows else super().checks()

    @on(e.RequestPreempted)
    def _was_preempted(self, event: e.RequestPreempted) -> None:
        self._preempted = (self.moment.sequence, num_intact_tokens(event))

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
        relied_on = model.answers.relied_on()
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
        tokens = self.spans.tokens_of_chunk(event.first_chunk)
        sequence, num_settled_tokens = self._preempted
        if event.cause == sequence and num_settled_tokens in tokens:  # it ends inside the chunk: a tail
            tokens = range(tokens.start, num_settled_tokens)
        return len(self.spans.pages_of(tokens))
