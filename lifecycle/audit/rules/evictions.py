"""Evictions: what stays in the host pool for whom, and how long."""

from __future__ import annotations

from collections import Counter

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.copies import Settled
from kvledger.lifecycle.reader.moment import Visits, num_intact_tokens
from kvledger.lifecycle.reader.records import NEVER, Copy


class EvictIdleOnly(Checker):
    """EVICT_IDLE_ONLY: a chunk that a load reads is not evicted.

    No load in flight reads the slots that an evicted chunk gives up.

    Verifies: this for every eviction, with slots folded from saves and loads.
    Does not verify: taints and resets, which take chunks away from whoever reads them by design; chunks that were
    promised and not claimed yet (HIT_PINNED).
    """

    rule = "EVICT_IDLE_ONLY"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._loads: dict[int, tuple[int, set[bytes]]] = {}
        """Job id -> (sequence of the load, keys of the chunks whose slots it reads)."""

    def begin(self) -> None:
        """Take over what loads in flight read."""
        for job_id, job in self.copies:
            if job.is_load:
                self._loads[job_id] = (0, self._keys_read_by(job))

    @on(e.ChunksEvicted)
    def _evicted(self, event: e.ChunksEvicted) -> None:
        for job_id, (sequence, read) in self._loads.items():
            for key in filter(read.__contains__, event.keys):
                detail = f"chunk {key.hex()} was evicted, though load {job_id} is still reading it"
                self.broken(detail, sequence, event.cause)

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued) -> None:
        if self.copies.current is not None:
            self._loads[event.job_id] = (self.moment.sequence, self._keys_read_by(self.copies.current))

    def _keys_read_by(self, load: Copy) -> set[bytes]:
        # A chunk may also lie in a shorter image of the same block; the load does not read that one.
        read = frozenset(load.slots) - {NO_SLOT}
        return {key for key in load.keys if not read.isdisjoint(self.chunks.slots_of(key) or ())}

    @on(Settled)
    def _settled(self, event: Settled) -> None:
        self._loads.pop(event.job_id, None)
        job = self.copies.current
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

    @on(e.ChunksEvicted)
    def _evicted(self, event: e.ChunksEvicted) -> None:
        for key in event.keys:
            for request_id, sequence in self.answers.promised(key):
                detail = f"chunk {key.hex()} was evicted, though the pending answer to {request_id!r} promised it"
                self.broken(detail, sequence, event.cause, request_id=request_id)


class WaitingKept(Checker):
    """WAITING_KEPT: what a preempted request will come back for is not evicted.

    From its preemption until it has blocks again or ends, no whole chunk that a request had computed is evicted.

    Verifies: this for every eviction, where the configuration keeps for the preempted (decision 0009): a save that
    would need the room is declined.
    Does not verify: what the request was promised already (HIT_PINNED); in which order the others are evicted
    (EVICTION_ORDER); chunks that were tainted or are from before a reset.
    """

    rule = "WAITING_KEPT"

    @on(e.ChunksEvicted)
    def _evicted(self, event: e.ChunksEvicted) -> None:
        for key in event.keys:
            for request_id, sequence in self.answers.waited_for(key):
                if all(request_id != whose for whose, _ in self.answers.promised(key)):
                    detail = f"chunk {key.hex()} was evicted, though {request_id!r} was preempted and waits for it"
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

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._preempted = (0, 0)
        """Sequence and settled tokens of the last preemption: what is declined because of it may be a tail."""

    def visits(self) -> Visits:
        """None where a group has a window."""
        return [] if self.layout.has_windows else super().visits()

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
        life = self.lives.get(request_id)
        freed: Counter[int] = Counter()
        for key in self.room.leaving(NEVER if life is None else life.ordinal):
            slots = self.chunks.slots_of(key) or ()
            freed.update(slots)
            num_missing -= sum([freed[slot] == self.slots.num_holders(slot) for slot in slots])
            if num_missing <= 0:
                return True
        return False

    def _num_pages(self, event: e.SaveDeclined) -> int:
        tokens = self.layout.tokens_of_chunk(event.first_chunk)
        sequence, num_settled_tokens = self._preempted
        if event.cause == sequence and num_settled_tokens in tokens:  # it ends inside the chunk: a tail
            tokens = range(tokens.start, num_settled_tokens)
        return len(self.layout.pages_of(tokens))


class EvictionOrder(Checker):
    """EVICTION_ORDER: of the chunks that may leave, the one that was used least recently leaves first.

    Each use makes a whole prefix the youngest, and of that the first chunk of the prompt the youngest. So a chunk never
    leaves before those after it. A prefix is used whenever something that needed it ends: an answer that promised it is
    claimed, replaced or taken back; a preempted request that waited for it gets blocks or ends; a copy that reads it,
    or that brings its last chunk, completes or fails. A request that is preempted or ends uses all that it has. While a
    prefix is needed it stays.

    Verifies: for every evicted chunk, in the order of the event, that each chunk used before it had to stay: it is in a
    prefix that is needed, or in the settled beginning of the request that saves. That no chunk of this beginning is
    evicted, and none before the chunks that a copy in flight reads or brings.
    Does not verify: chunks that were promised, waited for or read, and were evicted (HIT_PINNED, WAITING_KEPT,
    EVICT_IDLE_ONLY); whether so many evictions were needed. In which order chunks were used before the audit began is
    taken over. The rule is off where an extension says what is evicted last.
    """

    rule = "EVICTION_ORDER"
    expects_own_evictions = True

    @on(e.ChunksEvicted)
    def _evicted(self, event: e.ChunksEvicted) -> None:
        for key, oldest in self.room.out_of_turn:
            self._explain(event, key, oldest)

    def _explain(self, event: e.ChunksEvicted, key: bytes, oldest: bytes | None) -> None:
        is_read = any(key in job.keys for _, job in self.copies if job.is_load)
        if is_read or any(self.answers.promised(key)) or any(self.answers.waited_for(key)):
            return
        what = f"chunk {key.hex()} was evicted, though"
        copy = next(
            (job for _, job in self.copies if key in job.prefix.key_set and job.epoch == self.copies.epoch), None
        )
        if copy is not None:
            kind = "load" if copy.is_load else "save"
            self.broken(f"{what} {kind} {copy.job_id} in flight is of chunks after it", copy.sequence, event.cause)
        elif key in self.room.own_beginning(event.ordinal).key_set:
            life = self.lives.of(event.ordinal)
            if life is not None and life.settled[1]:
                self.broken(f"{what} it is in the beginning of the request that saves", event.cause)
        elif oldest is not None:
            self.broken(f"{what} chunk {oldest.hex()} was used before it and did not have to stay", event.cause)
