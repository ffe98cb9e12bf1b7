"""Evictions: which chunks stay in the host pool, and for how long."""

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
    """EVICT_IDLE_ONLY: a chunk is not evicted while a load reads it.

    Verifies: no load in flight reads a slot that an evicted chunk gives up.
    Does not verify: taints and resets, which remove chunks even if a load reads them; chunks that an answer promised
    (HIT_PINNED).
    """

    rule = "EVICT_IDLE_ONLY"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._loads: dict[int, tuple[int, set[bytes]]] = {}
        """Job id → (sequence number of the load, keys of the chunks whose slots it reads)."""

    def begin(self) -> None:
        """Read the loads in flight from the audit's model."""
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
        # The chunk may be in an earlier page of the same block, which the load does not read.
        read = frozenset(load.slots) - {NO_SLOT}
        return {key for key in load.keys if not read.isdisjoint(self.chunks.slots_of(key) or ())}

    @on(Settled)
    def _settled(self, event: Settled) -> None:
        self._loads.pop(event.job_id, None)
        job = self.copies.current
        if job is not None and not job.is_load:
            # The chunks of a settled save may have moved to its pages. Loads in flight read the earlier pages.
            for _, keys in self._loads.values():
                keys.difference_update(job.keys, (key for _, key in job.earlier_keys))


class HitPinned(Checker):
    """HIT_PINNED: chunks that a pending answer promised are not evicted.

    An answer promises all chunks up to the end of the offered tokens. It is pending until it is claimed, replaced or
    withdrawn.

    Verifies: no evicted chunk was promised by an answer that is still pending.
    Does not verify: taints and resets, which remove chunks even if they are promised.
    """

    rule = "HIT_PINNED"

    @on(e.ChunksEvicted)
    def _evicted(self, event: e.ChunksEvicted) -> None:
        for key in event.keys:
            for request_id, sequence in self.answers.promised(key):
                detail = f"chunk {key.hex()} was evicted, though the pending answer to {request_id!r} promised it"
                self.broken(detail, sequence, event.cause, request_id=request_id)


class WaitingKept(Checker):
    """WAITING_KEPT: chunks that a preempted request will load again are not evicted.

    If a save would need the slots of these chunks, kvledger declines the save instead.

    Verifies: from a request's preemption until it has blocks again or ends, none of its computed whole chunks is
    evicted. This is checked if the configuration keeps such chunks (`keep_for_preempted`, decision 0009).
    Does not verify: chunks that an answer has already promised to the request (HIT_PINNED); the order in which other
    chunks are evicted (EVICTION_ORDER); chunks that were tainted or are from before a reset.
    """

    rule = "WAITING_KEPT"

    @on(e.ChunksEvicted)
    def _evicted(self, event: e.ChunksEvicted) -> None:
        for key in event.keys:
            for request_id, sequence in self.answers.waited_for(key):
                if all(request_id != owner for owner, _ in self.answers.promised(key)):
                    detail = f"chunk {key.hex()} was evicted, though {request_id!r} was preempted and waits for it"
                    self.broken(detail, sequence, event.cause, request_id=request_id)


POOL_FULL = "pool_full"


class PinBalance(Checker):
    """PIN_BALANCE: no chunk is kept for a request that will not use it.

    The rule finds a chunk that is kept too long when a save is declined that could have had the chunk's slots.

    Verifies: whenever a save is declined with `pool_full`, there are too few free slots. There would still be too few
    if all chunks that this save may evict were evicted.
    Does not verify: chunks that are kept too long while no save is declined; models with sliding windows, in which the
    number of pages that a chunk needs depends on the windows.
    """

    rule = "PIN_BALANCE"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._preempted = (0, 0)
        """(sequence number, settled tokens) of the last preemption. A declined tail ends with these tokens."""

    def visits(self) -> Visits:
        """Return pairs (event class, method). If a group has a window, return no pairs: the rule is not checked."""
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
            f"a save of chunk {event.first_chunk} was declined: it needs {num_pages} slots, but {num_free} were free"
            f"{', and evicting chunks that no request relies on would have made room' if num_missing > 0 else ''}"
        )
        self.broken(detail, event.cause)

    def _has_room(self, num_missing: int, request_id: str) -> bool:
        """Whether evicting chunks for a save of this request could free `num_missing` slots."""
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
    """EVICTION_ORDER: of the chunks that may be evicted, the least recently used one is evicted first.

    Each use of a prefix makes its chunks the most recently used ones. The first chunk of the prompt counts as the most
    recent of them, so a chunk is never evicted before the chunks that follow it. A chunk of a prefix is not evicted
    while something holds the prefix. When the hold is over, this counts as a use of the prefix. There are three kinds
    of holds:

    - An answer holds the prefix that it promised, until the answer is claimed, replaced or withdrawn.
    - A preempted request holds the prefix that it waits for, until the request gets blocks or ends.
    - A copy holds the prefix that it reads, or to which it adds the last chunk, until the copy completes or fails.

    When a request is preempted or ends, this counts as a use of all of its chunks.

    Verifies: each evicted chunk is the least recently used of all chunks that the save may evict. A save may not evict
    chunks of a held prefix, or settled chunks of its own request. The rule is broken if it evicts such a settled chunk,
    or a chunk of a prefix that a copy in flight holds. An event evicts its chunks in the order in which it lists them.
    Does not verify: evicted chunks that were promised, waited for or read (HIT_PINNED, WAITING_KEPT, EVICT_IDLE_ONLY);
    whether so many evictions were needed; the order of uses before the audit's start. The rule is not checked if an
    extension chooses which chunks are evicted last.
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
            self.broken(f"{what} {kind} {copy.job_id} in flight copies chunks after it", copy.sequence, event.cause)
        elif key in self.room.own_beginning(event.ordinal).key_set:
            life = self.lives.of(event.ordinal)
            if life is not None and life.settled[1]:
                self.broken(f"{what} the request that saves begins with it", event.cause)
        elif oldest is not None:
            self.broken(f"{what} chunk {oldest.hex()} was used before it and could have been evicted", event.cause)
