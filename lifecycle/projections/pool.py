"""What is in the host pool: chunk key → slots, what must stay there, and in which order the rest leaves.

A chunk can be looked up from the moment its save is completed on every rank until it is evicted, tainted by a failed
load, or made stale by a reset. Recency is folded, too: loads and saves renew it, lookups change nothing. A save that
finds too few free slots evicts the oldest chunks that nobody is sure to come back for. All of that is one story, so it
is one file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.geometry import Geometry
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections.base import Projection, Subject
from kvledger.lifecycle.projections.copies import Copy, CopyKind
from kvledger.lifecycle.projections.jobs import Jobs
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.projections.tracker import RequestTracker
from kvledger.lifecycle.ranges import Count, NumSlots, Slot

_MANY = 4
"""Slots from which on it pays to ask whether they are those that come next."""
_SHORT = 16
"""Chunks up to which a prefix is renewed with every one of them, for an eighth of it is no more than one."""
_MAX_WAITING = 16_384
"""Keys of prefixes that may wait."""
_NUM_LEFT = _MAX_WAITING * 7 // 8
"""How many are left when there were too many; the oldest are dropped."""


class SlotsState(msgspec.Struct, forbid_unknown_fields=True):
    """Which slots are taken, and which come next."""

    num_touched: NumSlots = 0
    """One more than the largest slot that was ever taken."""
    skipped: list[tuple[NumSlots, NumSlots]] = []
    """(First, end) of slots below `num_touched` that were never taken, ascending."""
    free: list[NumSlots] = []
    failed: list[NumSlots] = []
    references: dict[NumSlots, Count] = {}

    def check(self, num_slots: int) -> None:
        """Check that each slot below `num_touched` is in exactly one place, and no other slot in any.

        Raises:
            ValueError: it is not so.
        """
        free, references = {*self.free, *self.failed}, self.references
        num_skipped, last_end, is_ascending = 0, 0, True
        for first, end in self.skipped:
            is_ascending = is_ascending and last_end <= first < end
            num_skipped, last_end = num_skipped + end - first, end
        num_listed = len(free) + len(references)
        is_whole = (
            len(free) == len(self.free) + len(self.failed)
            and references.keys().isdisjoint(free)
            and num_listed + num_skipped == self.num_touched <= num_slots
            and max(last_end - 1, *free, max(references, default=-1)) < self.num_touched
        )
        is_both = self.skipped and any(_run_of(self.skipped, slot) is not None for slot in (*free, *references))
        if not is_whole or not is_ascending or is_both:
            raise ValueError("a slot of the host pool is in two places or in none")


def _run_of(skipped: Sequence[tuple[int, int]], slot: int) -> int | None:
    """Where the run with that slot is; None where none has it."""
    place = bisect_right(skipped, slot, key=lambda run: run[0]) - 1
    return None if place < 0 or slot >= skipped[place][1] else place


class HostSlots(Projection):
    """Which slots are free. One slot holds one block's page over all layers; several short chunks may share it.

    Allocation of slot numbers is deterministic: freed ones first, newest first, then untouched ones, ascending.
    Last come those whose save failed, the one that failed longest ago first: where the slot is to blame, the next save
    would fail as well.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.state = SlotsState()

    def check(self) -> None:
        """Each slot is in one place."""
        self.state.check(self.num_slots)

    @property
    def num_free(self) -> int:
        """Slots that nobody references."""
        return self.num_slots - len(self.state.references)

    def num_references(self, slot: int) -> int:
        """Who needs the slot: chunks that lie in it, jobs that write or read it."""
        return self.state.references.get(slot, 0)

    def candidates(self, count: int) -> tuple[int, ...]:
        """The slots that the next save would use, fewer where fewer are free. Takes nothing."""
        free = self.state.free
        if count == 1 and free:  # most saves are of one page
            return (free[-1],)
        slots = free[: -count - 1 : -1]
        for first, end in (*self.state.skipped, (self.state.num_touched, self.num_slots)):
            slots.extend(range(first, min(first + count - len(slots), end)))
        slots.extend(self.state.failed[: count - len(slots)])
        return tuple(slots)

    def acquire(self, slots: Sequence[int]) -> None:
        """Add a reference to each slot, but for those that are `NO_SLOT`."""
        references, free = self.state.references, self.state.free
        num_slots = len(slots)
        # The next ones, which nobody references.
        if num_slots >= _MANY and not self.state.skipped and self.candidates(num_slots) == slots:
            num_more = max(0, num_slots - len(free))
            num_untouched = min(num_more, self.num_slots - self.state.num_touched)
            del free[-num_slots:]
            self.state.num_touched += num_untouched
            del self.state.failed[: num_more - num_untouched]
            for slot in slots:
                references[slot] = 1
            return
        for slot in slots:
            if slot in references:
                references[slot] += 1
            elif slot != NO_SLOT:
                references[slot] = 1
                if free and free[-1] == slot:
                    free.pop()
                elif slot == self.state.num_touched:
                    self.state.num_touched = slot + 1
                elif slot > self.state.num_touched:  # a log may name any slot: nothing is made for those before it
                    self.state.skipped.append((self.state.num_touched, slot))
                    self.state.num_touched = slot + 1
                elif not self._take_skipped(slot):
                    (self.state.failed if slot in self.state.failed else free).remove(slot)

    def _take_skipped(self, slot: int) -> bool:
        skipped = self.state.skipped
        place = _run_of(skipped, slot)
        if place is None:
            return False
        first, end = skipped[place]
        skipped[place : place + 1] = [run for run in ((first, slot), (slot + 1, end)) if run[0] < run[1]]
        return True

    def release(self, slots: Iterable[int], *, failed: bool = False) -> None:
        """Drop a reference from each slot; the last one frees it. `failed`: it was held for a save that failed."""
        references = self.state.references
        for slot in slots:
            count = references.get(slot, 0)
            if count == 1:
                del references[slot]
                (self.state.failed if failed else self.state.free).append(slot)
            elif count:
                references[slot] = count - 1


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


class State(msgspec.Struct, forbid_unknown_fields=True):
    """What is there. What was promised of it, and what is waited for, stands in the records of requests."""

    committed: dict[bytes, tuple[Slot, ...]] = {}
    """Every committed chunk and its slots."""
    by_age: Recency = msgspec.field(default_factory=Recency)
    """Committed chunks that nobody is sure to come back for, oldest first."""
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
        self._keep_for_preempted = keep_for_preempted
        self._kept_last = kept_last
        self.state = State()
        self.index()

    def index(self) -> None:
        """Make anew what follows from the state, from requests, and from the copies in flight."""
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

    def num_committed_from(self, keys: Iterable[bytes]) -> int:
        """How many of the keys, from the first on, are committed without a gap."""
        count = 0
        for key in keys:
            if key not in self.state.committed:
                break
            count += 1
        return count

    def oldest_first(self) -> Iterable[bytes]:
        """Committed chunks that nobody is sure to come back for; those that extensions want to keep come last."""
        last = self._kept_last()
        return sorted(self.state.by_age, key=last.__contains__) if last else self.state.by_age

    def is_kept(self, key: bytes, slots: Iterable[int]) -> bool:
        """Whether a lookup promised the chunk, or a load reads it."""
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
            record.wanted = tuple(record.keys[: self._geometry.num_chunks_in(num_intact_tokens(event))])
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
            keys = subject.request.keys
            _count_up(self._saving, [keys[chunk] for chunk in event.chunks if chunk < len(keys)])

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
        committed = self.state.committed
        # The deepest first, as they are touched.
        for key, slots_of_chunk in zip(keys[::-1], slots_by_chunk[::-1], strict=True):
            if key in committed:
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

    @on(e.ChunksEvicted)
    def _evicted(self, event: e.ChunksEvicted, _sequence: int, _subject: Subject) -> None:
        for key in event.keys:
            self._remove(key)

    @on(e.ChunksTainted)
    def _tainted(self, event: e.ChunksTainted, _sequence: int, _subject: Subject) -> None:
        for key in event.keys:
            self._remove(key)

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset, _sequence: int, _subject: Subject) -> None:
        for key in tuple(self.state.committed):
            self._remove(key)
        for counts in (self._saving, self._wanted, self._pins):
            counts.clear()
        for record in self._tracker:
            record.pinned = record.wanted = ()

    def _remove(self, key: bytes) -> None:
        slots = self.state.committed.pop(key, None)
        self.state.by_age.discard(key)
        if slots is not None:
            self.slots.release(slots)
            self.state.num_removed += 1


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


def num_intact_tokens(event: e.RequestPreempted | e.RequestFinished) -> int:
    """Of the settled tokens those that a copy made before the next forward still finds."""
    return 0 if event.blocks_zeroed else event.num_settled_tokens
