"""Evictions: what stays in the host pool for whom, and how long."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import islice

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.jobs import Settled
from kvledger.lifecycle.audit.model.moment import EventChecks, num_intact_tokens
from kvledger.lifecycle.audit.model.records import InFlight
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

    @on(e.ChunksEvicted)
    def _evicted(self, event: e.ChunksEvicted) -> None:
        for job_id, (sequence, read) in self._loads.items():
            for key in filter(read.__contains__, event.keys):
                detail = f"chunk {key.hex()} was evicted, though load {job_id} is still reading it"
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


class EvictionOrder(Checker):
    """EVICTION_ORDER: among the chunks that may be evicted, the least recently used one is evicted first.

    A chunk is used when a save of it completes, when a load reads it or a chunk after it, when a request that has it is
    preempted or ends, and when a preempted request that waited for it gets blocks again. A save of a growing request
    uses all chunks before it: every save in the first 16 chunks, later whenever the request has grown by an eighth. A
    lookup uses nothing. Of the chunks that one event uses, the first one of the prompt counts as the youngest.

    Verifies: for every eviction, that each chunk used before the evicted one had to stay: it is promised, a preempted
    request waits for it, it belongs to the request that saves, or its slots are needed by a load or by another chunk.
    Does not verify: chunks that stay although a lookup has promised them since they were saved, because they may still
    be pinned (PIN_BALANCE names that when a save is declined for them); chunks that share the slot of a block with
    others; more than 256 chunks that had to stay, for one save; chunks that had to stay themselves and were evicted
    (HIT_PINNED, WAITING_KEPT, EVICT_IDLE_ONLY); whether so many evictions were needed. The order in which chunks were
    used before the audit began is taken over. The rule is off where an extension says what is evicted last.
    """

    rule = "EVICTION_ORDER"
    expects_own_evictions = True

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._order: OrderedDict[bytes, None] = OrderedDict()
        """Committed chunks, least recently used first; without those found to be waited for."""
        self._waited_for: dict[str, dict[bytes, None]] = {}
        """Request id → chunks that it was preempted with, in their order, until it has blocks again or ends."""
        self._save = (0, 0)
        """Cause and ordinal of the last eviction before which another chunk was used."""
        self._own: frozenset[bytes] = frozenset()
        """Chunks of the request that saves."""
        self._once_promised: set[bytes] = set()
        """Committed chunks that a lookup has promised since they were saved."""
        self._leaving: Counter[int] = Counter()
        """Slot → chunks in it that leave for the save at hand and are not looked at yet."""
        self._passed: set[bytes] = set()
        """Chunks at the front of the order that had to stay in this save."""

    def begin(self, start: Start) -> None:
        """Take over in which order chunks were used, and what is waited for."""
        self._order = OrderedDict.fromkeys((*start.by_age, *start.committed))
        self._waited_for.update((who, dict.fromkeys(keys)) for who, keys in start.waited_for.items())

    # --- uses ------------------------------------------------------------------------------------

    def _use(self, keys: Sequence[bytes]) -> None:
        order = self._order
        self._passed.clear()
        deque(map(order.move_to_end, filter(order.__contains__, reversed(keys))), 0)

    def _add(self, keys: Iterable[bytes]) -> None:
        order, chunks = self._order, self.chunks
        self._passed.clear()
        for key in keys:
            if key in chunks:
                order[key] = None
                order.move_to_end(key)

    @on(e.SaveCompleted)
    def _saved(self, _event: e.SaveCompleted) -> None:
        job = self.jobs.current
        if job is None or job.is_load or job.epoch != self.jobs.epoch:
            return
        self._add((*reversed(job.keys), *(key for _, key in reversed(job.earlier_keys))))
        first = job.chunks[0] if job.chunks else 0
        if first and (first < _EVERY_SAVE or first % (first // 8) == 0):
            life = self.lives.of(job.ordinal)
            self._use(() if life is None else life.keys[:first])

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued) -> None:
        life = self.lives.of(event.ordinal)
        if life is not None:
            self._use(life.keys[: -(-(event.first_token + event.num_tokens) // self.spans.chunk_size)])

    @on(e.RequestPreempted)
    def _was_preempted(self, event: e.RequestPreempted) -> None:
        life = self.moment.life
        if life is None or not self.moment.is_legal:
            return
        self._use(life.keys)
        if self.configuration.keep_for_preempted:
            self._no_longer_waiting(event.request_id)
            keys = life.keys[: num_intact_tokens(event) // self.spans.chunk_size]
            self._waited_for[event.request_id] = dict.fromkeys(keys)

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        if self._waited_for and self.moment.is_legal:
            self._no_longer_waiting(event.request_id)

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived) -> None:
        if self._waited_for:
            self._no_longer_waiting(event.request_id)

    @on(e.RequestFinished)
    def _finished(self, event: e.RequestFinished) -> None:
        self._no_longer_waiting(event.request_id)
        if self.moment.life is not None:
            self._use(self.moment.life.keys)

    def _no_longer_waiting(self, request_id: str) -> None:
        keys = self._waited_for.pop(request_id, None)
        if keys:
            self._add(reversed(keys))

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        if event.num_external_tokens:
            life = self.lives.of(event.ordinal)
            num_tokens = event.num_computed_tokens + event.num_external_tokens
            keys = () if life is None else life.keys[: -(-num_tokens // self.spans.chunk_size)]
            self._once_promised.update(filter(self.chunks.__contains__, keys))

    # --- what is gone ----------------------------------------------------------------------------

    @on(e.ChunksTainted)
    def _tainted(self, event: e.ChunksTainted) -> None:
        for key in event.keys:
            self._passed.discard(key)
            self._once_promised.discard(key)
            self._order.pop(key, None)

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset) -> None:
        self._order.clear()
        self._once_promised.clear()
        self._passed.clear()
        self._waited_for.clear()

    @on(e.ChunksEvicted)
    def _evicted(self, event: e.ChunksEvicted) -> None:
        self._leaving = Counter(slot for slots in self.chunks.evicted.values() for slot in slots)
        for key in event.keys:
            self._leaving.subtract(self.chunks.evicted[key])
            self._check_order(event, key)
        self._leaving.clear()

    def _check_order(self, event: e.ChunksEvicted, evicted: bytes) -> None:
        self._once_promised.discard(evicted)
        if evicted not in self._order:
            return
        if evicted in self._passed:
            self._passed.clear()
        older = None if next(iter(self._order)) == evicted else self._older(event, evicted)
        del self._order[evicted]
        if older is not None and not self._had_to_stay(evicted):
            detail = (
                f"chunk {evicted.hex()} was evicted, though chunk {older.hex()} was used before it and did not have "
                f"to stay"
            )
            self.broken(detail, event.cause)

    def _older(self, event: e.ChunksEvicted, evicted: bytes) -> bytes | None:
        """A chunk that was used before the evicted one and could have been evicted in its place."""
        if self._save != (event.cause, event.ordinal):
            life = self.lives.of(event.ordinal)
            self._save = event.cause, event.ordinal
            self._passed.clear()
            self._own = frozenset(() if life is None else life.keys)
        waited_for: list[bytes] = []
        older = None
        for key in islice(self._order, len(self._passed), _MAX_PASSED):
            if key == evicted:
                break
            if any(key in keys for keys in self._waited_for.values()):
                waited_for.append(key)
            elif self._could_be_evicted(key):
                older = key
                break
            else:
                self._passed.add(key)
        for key in waited_for:  # used when that is over; no later walk has to pass them
            del self._order[key]
        return older

    def _could_be_evicted(self, key: bytes) -> bool:
        # What leaves later for the same save still lies in its slots.
        slots = self.chunks.slots_of(key) or self.chunks.evicted.get(key, ())
        holders = [self.slots.num_holders(slot) + self._leaving[slot] for slot in slots if slot != NO_SLOT]
        is_in_use = key in self._own or key in self._once_promised or self._is_relied_on(key)
        return not is_in_use and set(holders) == {1}

    def _had_to_stay(self, key: bytes) -> bool:
        loads = filter(None, map(self.jobs.get, self.jobs.loads))
        return self._is_relied_on(key) or any(key in load.keys for load in loads)

    def _is_relied_on(self, key: bytes) -> bool:
        return any(self.answers.promised(key)) or any(self.answers.waited_for(key))


_EVERY_SAVE = 16
"""Chunks up to which every save of a growing request uses all chunks before it."""
_MAX_PASSED = 256
"""Chunks that had to stay, which are looked at for one save."""
