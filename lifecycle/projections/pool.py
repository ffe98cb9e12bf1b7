"""What is in the host pool: chunk key → slots, what must stay there, and in which order the rest leaves.

A chunk can be looked up from the moment its save is completed on every rank until it is evicted, tainted by a failed
load, or made stale by a reset. Recency is folded, too: loads and saves renew it, lookups change nothing. A save that
finds too few free slots evicts the oldest chunks that nobody is sure to come back for. All of that is one story, so it
is one file.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence

import attrs
import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.geometry import Geometry
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections.base import Projection, Subject
from kvledger.lifecycle.projections.copies import Copy, CopyKind
from kvledger.lifecycle.projections.jobs import Jobs
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.projections.slots import HostSlots
from kvledger.lifecycle.projections.tracker import RequestTracker
from kvledger.lifecycle.ranges import Count, Slot
from kvledger.lifecycle.ranges import Sequence as SequenceNumber

_SHORT = 16
"""Chunks up to which a prefix is renewed with every one of them, for an eighth of it is no more than one."""
_MAX_WAITING = 16_384
"""Keys of prefixes that may wait."""
_NUM_LEFT = _MAX_WAITING * 7 // 8
"""How many are left when there were too many; the oldest are dropped."""


class Recency:
    """Chunk keys, oldest first. Deeper chunks count as older: without its beginning a prefix is worth nothing."""

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict.fromkeys(keys)
        """Every key, in the order of those touches that do not wait."""
        self._waiting: deque[Sequence[bytes]] = deque()
        """Touches in their order: prefixes are lists of their own, which are emptied when they wait no more."""
        self._num_waiting = 0
        """Keys of the prefixes among them."""
        self._prefix_of: dict[int, list[bytes]] = {}
        """Life of a request -> its last prefix."""

    def __iter__(self) -> Iterator[bytes]:
        self._take_up(0)
        return iter(self._order)

    def __contains__(self, key: bytes) -> bool:
        return key in self._order

    def add(self, keys: tuple[bytes, ...]) -> None:
        """Make chunks the youngest, whether they were there or not."""
        order = self._order
        for key in reversed(keys):
            order[key] = None
        self._waiting.append(keys)

    def touch_prefix(self, ordinal: int, keys: list[bytes]) -> None:
        """Make what a request begins with the youngest, as far as it is there. The list is the caller's no more."""
        earlier = self._prefix_of.get(ordinal)
        # A key stands for everything before it, so one that is equal says that all of them are touched anew.
        if earlier and len(earlier) <= len(keys) and earlier[-1] == keys[len(earlier) - 1]:
            self._num_waiting -= len(earlier)
            earlier.clear()
        self._prefix_of[ordinal] = keys
        self._waiting.append(keys)
        self._num_waiting += len(keys)
        if self._num_waiting > _MAX_WAITING:
            self._take_up(_NUM_LEFT)

    def discard(self, key: bytes) -> None:
        """Forget a key until it is added again."""
        self._order.pop(key, None)

    def _take_up(self, num_left: int) -> None:
        order, waiting = self._order, self._waiting
        while waiting and (not num_left or self._num_waiting > num_left):
            keys = waiting.popleft()
            # Without a line of Python for each key; some may be gone, or not be there yet.
            deque(map(order.move_to_end, filter(order.__contains__, reversed(keys))), 0)
            if isinstance(keys, list):
                self._num_waiting -= len(keys)
                keys.clear()
        self._prefix_of = {ordinal: keys for ordinal, keys in self._prefix_of.items() if keys}


class Room:
    """Chunks that may be evicted, oldest first. Nothing may be evicted in the pool while this is asked."""

    def __init__(
        self,
        oldest_first: Iterable[bytes],
        slots_of: Mapping[bytes, Sequence[int]],
        num_references: Callable[[int], int],
        is_kept: Callable[[bytes, Sequence[int]], bool],
        spare: Container[bytes],
    ) -> None:
        self._keys = iter(oldest_first)
        self._slots_of = slots_of
        self._num_references = num_references
        self._is_kept = is_kept
        self._spare = spare
        self._num_left: dict[int, int] = {}
        """Slot → references that are left after the evictions so far."""
        self._passed_over: list[bytes] = []
        """Chunks whose pages others still need, oldest first. A later eviction may make them worth evicting."""
        self.num_freed = 0
        """Slots that the evictions so far free."""

    def free(self, num_slots: int) -> tuple[bytes, ...] | None:
        """Return the further chunks to evict so that `num_slots` more slots become free; None if there are too few."""
        candidates: list[bytes] = []
        num_left: dict[int, int] = {}
        num_freed = 0
        for key in self._candidates():
            candidates.append(key)
            for slot in self._slots_of[key]:
                num_left[slot] = left = (num_left[slot] if slot in num_left else self._left(slot)) - 1
                if left == 0:  # never so for NO_SLOT, which nobody references
                    num_freed += 1
            if num_freed >= num_slots:
                break
        else:
            self._passed_over = candidates
            return None
        victims: list[bytes] = []
        passed_over: list[bytes] = []
        for key in candidates:
            frees = any(num_left[slot] == 0 for slot in self._slots_of[key])
            (victims if frees else passed_over).append(key)
        for key in victims:
            for slot in self._slots_of[key]:
                self._num_left[slot] = self._left(slot) - 1
        self._passed_over = passed_over + self._passed_over
        self.num_freed += num_freed
        return tuple(victims)

    def _left(self, slot: int) -> int:
        left = self._num_left.get(slot)
        return self._num_references(slot) if left is None else left

    def _candidates(self) -> Iterable[bytes]:
        while self._passed_over:
            yield self._passed_over.pop(0)
        for key in self._keys:
            slots = self._slots_of.get(key)  # a snapshot may name keys here that are not in the pool
            if slots is not None and key not in self._spare and not self._is_kept(key, slots):
                yield key


@attrs.frozen
class Departed:
    """Why and by which event a chunk left."""

    reason: e.MissReason
    sequence: SequenceNumber


class State(msgspec.Struct, forbid_unknown_fields=True):
    """What is there. What was promised of it, and what is waited for, stands in the records of requests."""

    committed: dict[bytes, tuple[Slot, ...]] = {}
    """Every committed chunk and its slots."""
    by_age: Recency = msgspec.field(default_factory=Recency)
    """Committed chunks that nobody is sure to come back for, oldest first."""
    departed: dict[bytes, Departed] = {}
    """The longest gone first."""
    num_added: Count = 0
    """How often chunks were added."""
    num_removed: Count = 0
    """How often a chunk was removed."""


class Pool(Projection):
    """Committed chunks, what nobody waits for in order of recency, and what is promised or waited for besides.

    A settlement concerns its job, a promise the generation that it was made to.
    """

    def __init__(
        self,
        tracker: RequestTracker,
        geometry: Geometry,
        slots: HostSlots,
        jobs: Jobs,
        *,
        keep_for_preempted: bool,
        kept_last: Callable[[], Collection[bytes]],
    ) -> None:
        """`kept_last` returns the keys of the chunks that are evicted after all others."""
        self._tracker = tracker
        self._geometry = geometry
        self._jobs = jobs
        self.slots = slots
        self._max_departed = max(1024, 4 * slots.num_slots)
        self._keep_for_preempted = keep_for_preempted
        self._kept_last = kept_last
        self.state = State()
        self.index()

    def index(self) -> None:
        """Make anew what follows from the state, from requests, and from the copies in flight."""
        self._departed = self.state.departed = OrderedDict(self.state.departed)
        self._pins: dict[bytes, int] = {}
        self._wanted: dict[bytes, int] = {}
        self._saving: dict[bytes, int] = {}
        for record in self._tracker:
            _count_up(self._pins, record.pinned)
            _count_up(self._wanted, record.wanted)
        for copy in self._jobs:
            if copy.kind is CopyKind.SAVE and self._jobs.is_current(copy):
                _count_up(self._saving, copy.keys)

    def __len__(self) -> int:
        return len(self.state.committed)

    def get(self, key: bytes) -> tuple[int, ...] | None:
        """The slots of a committed chunk, or None."""
        return self.state.committed.get(key)

    @property
    def promised(self) -> Mapping[str, tuple[bytes, ...]]:
        """Request id -> the chunks that its pending answer promised."""
        return {record.request_id: record.pinned for record in self._tracker if record.pinned}

    @property
    def wanted(self) -> Mapping[str, tuple[bytes, ...]]:
        """Request id -> the chunks that it was preempted with and will come back for."""
        return {record.request_id: record.wanted for record in self._tracker if record.wanted}

    def is_saving(self, key: bytes) -> bool:
        """Whether a save of the chunk is in flight."""
        return key in self._saving

    def unsaved(self, keys: Sequence[bytes], first_chunk: int, end_chunk: int) -> list[int]:
        """Of these chunks those that are neither committed nor being saved."""
        saving, committed = self._saving, self.state.committed
        unsaved = []
        for chunk in range(first_chunk, end_chunk):  # a comprehension costs more where there is one chunk, as mostly
            key = keys[chunk]
            if key not in committed and key not in saving:
                unsaved.append(chunk)
        return unsaved

    def departed(self, key: bytes) -> Departed | None:
        """Why the chunk is gone, as long as that is remembered (a bounded number of chunks)."""
        return self._departed.get(key)

    def num_committed_from(self, keys: Iterable[bytes]) -> int:
        """How many of the keys, from the first on, are committed without a gap."""
        count = 0
        for key in keys:
            if key not in self.state.committed:
                break
            count += 1
        return count

    def room(self, spare: Container[bytes]) -> Room:
        """What one save may evict, oldest first; to be asked for all of it before any of it is evicted.

        A chunk that a lookup promised, that a preempted request will come back for, that a load reads, or that is in
        `spare` stays. So does a chunk whose page another one needs, because evicting it would free nothing. Chunks that
        extensions want to keep come after all others.
        """
        by_age: Iterable[bytes] = self.state.by_age
        last = self._kept_last()
        if last:
            by_age = sorted(by_age, key=last.__contains__)
        return Room(by_age, self.state.committed, self.slots.num_references, self._is_kept, spare)

    def _is_kept(self, key: bytes, slots: Iterable[int]) -> bool:
        return key in self._pins or self._jobs.is_any_read(slots)

    # --- promises made by lookups ------------------------------------------------------------

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered, _sequence: int, subject: Subject) -> None:
        record = subject.current
        if record is None:
            return
        keys: tuple[bytes, ...] = ()
        if event.num_external_tokens:
            num_tokens = event.num_computed_tokens + event.num_external_tokens
            num_chunks = -(-num_tokens // self._geometry.chunk_size)
            keys = tuple(record.keys[:num_chunks])
        if keys != record.pinned:
            self._unpin(record)
            _count_up(self._pins, keys)
            record.pinned = keys

    @on(e.LookupDeferred)
    def _deferred(self, _event: e.LookupDeferred, _sequence: int, subject: Subject) -> None:
        if subject.current is not None:
            self._unpin(subject.current)

    @on(e.DecisionWithheld)
    def _withheld(self, event: e.DecisionWithheld, _sequence: int, _subject: Subject) -> None:
        record = self._tracker.get(event.request_id)
        if record is not None:
            self._unpin(record)

    def _unpin(self, record: RequestRecord) -> None:
        _count_down(self._pins, record.pinned)
        record.pinned = ()

    # --- loads -------------------------------------------------------------------------------

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued, _sequence: int, subject: Subject) -> None:
        self.slots.acquire(event.slots)
        num_chunks = -(-(event.first_token + event.num_tokens) // self._geometry.chunk_size)
        self._renew(subject.request, num_chunks)

    def _renew(self, record: RequestRecord | None, num_chunks: int) -> None:
        keys = [] if record is None else record.keys[:num_chunks]
        if record is not None and keys:
            self.state.by_age.touch_prefix(record.ordinal, keys)

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted, _sequence: int, subject: Subject) -> None:
        record = subject.request
        if record is None:
            return
        self._unpin(record)
        self._renew(record, len(record.keys))
        if self._keep_for_preempted:
            self._no_longer_want(record)
            record.wanted = tuple(record.keys[: self._geometry.num_chunks_in(event.num_intact_tokens)])
            _count_up(self._wanted, record.wanted)
            for key in record.wanted:
                self.state.by_age.discard(key)

    @on(e.BlocksAllocated, e.RequestArrived)
    def _allocated(self, _event: e.BlocksAllocated | e.RequestArrived, _sequence: int, subject: Subject) -> None:
        self._let_go(subject.request)

    @on(e.RequestFinished)
    def _finished(self, _event: e.RequestFinished, _sequence: int, subject: Subject) -> None:
        self._let_go(subject.request)
        if subject.request is not None:
            self._renew(subject.request, len(subject.request.keys))

    @on(e.RequestReleased)
    def _released(self, _event: e.RequestReleased, _sequence: int, subject: Subject) -> None:
        self._let_go(subject.current)

    def _let_go(self, record: RequestRecord | None) -> None:
        """The request relies on no chunk any more."""
        if record is not None and (record.pinned or record.wanted):
            self._unpin(record)
            self._no_longer_want(record)

    def _no_longer_want(self, record: RequestRecord) -> None:
        keys, record.wanted = record.wanted, ()
        if keys:
            _count_down(self._wanted, keys)
            self.state.by_age.add(self._unwanted(keys))

    @on(e.TransferReported)
    def _reported(self, _event: e.TransferReported, _sequence: int, _subject: Subject) -> None:
        for copy in self._jobs.late_ends:
            self.slots.release(copy.slots, failed=True)

    @on(e.LoadCompleted, e.LoadFailed)
    def _load_settled(self, _event: e.LoadCompleted | e.LoadFailed, _sequence: int, subject: Subject) -> None:
        load = subject.copy
        if load is not None and load.kind is CopyKind.LOAD:
            self.slots.release(load.slots)

    # --- saves -------------------------------------------------------------------------------

    @on(e.SaveIssued)
    def _save_issued(self, event: e.SaveIssued, _sequence: int, subject: Subject) -> None:
        self.slots.acquire(event.slots)
        if subject.request is not None:
            _count_up(self._saving, subject.request.keys_of(event.chunks))

    @on(e.TailSaveIssued)
    def _tail_save_issued(self, event: e.TailSaveIssued, _sequence: int, _subject: Subject) -> None:
        self.slots.acquire(event.slots)

    @on(e.SaveCompleted)
    def _save_completed(self, _event: e.SaveCompleted, _sequence: int, subject: Subject) -> None:
        save = subject.copy
        if save is None:
            return
        if save.epoch != self._jobs.epoch:
            self.slots.release(save.slots)
            return
        _count_down(self._saving, save.keys)
        if not self._place_whole(save):
            self._place_pages(save)
            self.slots.release(save.slots)
        # A growing request's beginning must not look older than its end. Renewing it whenever it has grown by an
        # eighth keeps the cost per chunk constant.
        first = save.chunks[0] if save.chunks else 0
        if first and (first < _SHORT or first % (first // 8) == 0):
            self._renew(self._tracker.of(save.ordinal), first)
        self.state.num_added += 1

    def _place_whole(self, save: Copy) -> bool:
        """Let chunks that are whole blocks be found, if every one is complete; else return False.

        The save's references on its slots go over to the chunks.
        """
        keys = save.keys
        slots_by_chunk = self._geometry.slots_by_chunk(save.slots, len(keys))
        if slots_by_chunk is None or len(keys) != len(save.chunks) or NO_SLOT in save.slots:
            return False
        committed, departed = self.state.committed, self._departed
        # The deepest first, as they are touched.
        for key, slots_of_chunk in zip(keys[::-1], slots_by_chunk[::-1], strict=True):
            if key in committed or key in departed:
                self._commit(key, slots_of_chunk)
            else:
                committed[key] = slots_of_chunk
        self.state.by_age.add(self._unwanted(keys) if self._wanted else keys)
        return True

    def _commit(self, key: bytes, slots: tuple[int, ...]) -> None:
        """Let a chunk be found in slots that are referenced for it; whoever calls touches it."""
        committed = self.state.committed
        if key in committed:
            self.slots.release(committed[key])
        elif key in self._departed:
            del self._departed[key]
        committed[key] = slots

    def _unwanted(self, keys: Iterable[bytes]) -> tuple[bytes, ...]:
        return tuple([key for key in keys if key in self.state.committed and key not in self._wanted])

    def _place_pages(self, save: Copy) -> None:
        pages = self._geometry.pages_for(save.chunks, len(save.slots))
        slot_of_page = dict(zip(pages, save.slots, strict=False))
        for chunk, key in reversed(dict(zip(save.chunks, save.keys, strict=False)).items()):
            self._place(chunk, key, slot_of_page)
        for chunk, key in reversed(save.earlier_keys):
            if key in self.state.committed:  # the new image of this block is longer and contains the shorter one
                self._place(chunk, key, slot_of_page)

    def _place(self, chunk: int, key: bytes, slot_of_page: Mapping[int, int]) -> None:
        slots = self._geometry.slots_of(chunk, slot_of_page)
        replaced = self.state.committed.get(key)
        if slots is not None and NO_SLOT in slots:
            slots = self._completed(slots, replaced)
        if slots is None:
            return  # a save that names too few slots; folding it must not fail, and it must not be found
        self.slots.acquire(slots)
        self._commit(key, slots)
        self.state.by_age.add(self._unwanted((key,)))

    def _completed(self, slots: tuple[int, ...], stored: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Slots with what is stored already where the save brought nothing; None where a page that all see is missing.

        A group with a window may lack pages: it did not see them any more when the chunk was saved.
        """
        if stored is not None and len(stored) == len(slots):
            slots = tuple(old if new == NO_SLOT else new for new, old in zip(slots, stored, strict=True))
        sizes = self._geometry.window_sizes
        missing = any(slot == NO_SLOT and not sizes[place % len(sizes)] for place, slot in enumerate(slots))
        return None if missing else slots

    @on(e.SaveFailed)
    def _save_failed(self, event: e.SaveFailed, _sequence: int, subject: Subject) -> None:
        save = subject.copy
        if save is None:
            return
        if self._jobs.is_current(save):
            _count_down(self._saving, save.keys)
        if event.quiet:
            self.slots.release(save.slots, failed=True)

    # --- leaving -----------------------------------------------------------------------------

    @on(e.ChunkEvicted)
    def _evicted(self, event: e.ChunkEvicted, sequence: int, _subject: Subject) -> None:
        self._remove(event.key, Departed(e.MissReason.EVICTED, sequence))

    @on(e.ChunkTainted)
    def _tainted(self, event: e.ChunkTainted, sequence: int, _subject: Subject) -> None:
        self._remove(event.key, Departed(e.MissReason.TAINTED, sequence))

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset, sequence: int, _subject: Subject) -> None:
        for key in tuple(self.state.committed):
            self._remove(key, Departed(e.MissReason.RESET, sequence))
        for counts in (self._saving, self._wanted, self._pins):
            counts.clear()
        for record in self._tracker:
            record.pinned = record.wanted = ()

    def _remove(self, key: bytes, why: Departed) -> None:
        slots = self.state.committed.pop(key, None)
        self.state.by_age.discard(key)
        if slots is None:
            return
        self.slots.release(slots)
        self.state.num_removed += 1
        self._departed[key] = why
        self._departed.move_to_end(key)
        if len(self._departed) > self._max_departed:
            self._departed.popitem(last=False)


def _count_up(counts: dict[bytes, int], keys: Iterable[bytes]) -> None:
    for key in keys:
        if key in counts:
            counts[key] += 1
        else:
            counts[key] = 1


def _count_down(counts: dict[bytes, int], keys: Iterable[bytes]) -> None:
    for key in keys:
        count = counts.pop(key, 1)  # mostly it was the only one
        if count > 1:
            counts[key] = count - 1
