"""The host pool: the slots of each chunk, the holders of chunks, and the order in which chunks are evicted.

A chunk can be looked up from the completion of its save on every rank until it is evicted, tainted by a failed load, or
made stale by a reset. A prefix has a holder as long as an answer promises it, a preempted request will come back for
it, or a copy of it is in flight. `forest.py` decides which chunk without a holder is evicted first. A lookup changes
no chunks; only its answer may add a holder.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TypeVar

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.geometry import Geometry, keys_at
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections.base import Projection, Subject
from kvledger.lifecycle.projections.copies import Copy, CopyKind
from kvledger.lifecycle.projections.forest import Forest, Queue
from kvledger.lifecycle.projections.jobs import Jobs
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.projections.tracker import RequestTracker
from kvledger.lifecycle.ranges import Count, JobId, NumSlots, Ordinal

_T = TypeVar("_T")
_MANY = 4
"""Number of slots from which the fast paths are worth their checks."""


class SlotsState(msgspec.Struct, forbid_unknown_fields=True):
    """Which slots are taken, and in which order free slots will be taken."""

    num_touched: NumSlots = 0
    """One more than the largest slot ever taken."""
    skipped: list[tuple[NumSlots, NumSlots]] = []
    """(first, end) of runs of slots below `num_touched` that were never taken, ascending."""
    free: list[NumSlots] = []
    failed: list[NumSlots] = []
    references: dict[NumSlots, Count] = {}

    def check(self, num_slots: int) -> None:
        """Check that each slot below `num_touched` is in exactly one field of this state, and no other slot is in any.

        Raises:
            ValueError: a slot is in two fields or in none.
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
            raise ValueError("a slot of the host pool is stored more than once, or not at all")


def _run_of(skipped: Sequence[tuple[int, int]], slot: int) -> int | None:
    """Return the index of the run that contains the slot; None if no run does."""
    place = bisect_right(skipped, slot, key=lambda run: run[0]) - 1
    return None if place < 0 or slot >= skipped[place][1] else place


class HostSlots(Projection):
    """The free and the taken slots. A slot holds one page; several chunks that are shorter than a block may share it.

    Slots are allocated in a deterministic order:

    1. freed slots, the last one freed first;
    2. slots that were never taken, ascending;
    3. slots whose save failed, the earliest failure first. They are last because saves into a bad slot fail again.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.state = SlotsState()

    def check(self) -> None:
        """Check that each slot is listed once, as taken or as free."""
        self.state.check(self.num_slots)

    @property
    def num_free(self) -> int:
        """Number of slots without references."""
        return self.num_slots - len(self.state.references)

    def num_references(self, slot: int) -> int:
        """Return how many chunks and tails are in the slot, plus how many jobs write or read the slot."""
        return self.state.references.get(slot, 0)

    def candidates(self, count: int) -> tuple[int, ...]:
        """Return the `count` slots that the next save would use; fewer if fewer are free."""
        free = self.state.free
        if count == 1 and free:  # most saves are of one page
            return (free[-1],)
        slots = free[: -count - 1 : -1]
        for first, end in (*self.state.skipped, (self.state.num_touched, self.num_slots)):
            slots.extend(range(first, min(first + count - len(slots), end)))
        slots.extend(self.state.failed[: count - len(slots)])
        return tuple(slots)

    def acquire(self, slots: Sequence[int]) -> None:
        """Add a reference to each slot except `NO_SLOT`."""
        references, free = self.state.references, self.state.free
        num_slots = len(slots)
        # Fast path: exactly the next free slots.
        if num_slots >= _MANY and not self.state.skipped and self.candidates(num_slots) == slots:
            num_more = max(0, num_slots - len(free))
            num_untouched = min(num_more, self.num_slots - self.state.num_touched)
            del free[-num_slots:]
            self.state.num_touched += num_untouched
            del self.state.failed[: num_more - num_untouched]
            references.update(dict.fromkeys(slots, 1))
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
                elif slot > self.state.num_touched:  # a log may name any slot, so those before it are one run
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

    def release(self, slots: Sequence[int], *, failed: bool = False) -> None:
        """Remove a reference from each slot. A slot without references is free.

        `failed`: whether a save into the slots failed.
        """
        references, free = self.state.references, self.state.failed if failed else self.state.free
        if len(slots) >= _MANY and _have_count_1(references, slots):
            deque(map(references.__delitem__, slots), 0)
            free.extend(slots)
            return
        for slot in slots:
            count = references.get(slot, 0)
            if count == 1:
                del references[slot]
                free.append(slot)
            elif count:
                references[slot] = count - 1


class State(msgspec.Struct, forbid_unknown_fields=True):
    """The chunks and their holders. Chunks are only bytes and ints, which Python's garbage collector does not visit."""

    committed: dict[bytes, bytes] = {}
    """Key of a chunk that can be looked up → its slots, 8 bytes each."""
    parent_of: dict[bytes, bytes | None] = {}
    """Key of a chunk or ghost → key of the chunk before it in the prompt, or None. Parents come first."""
    queue: Queue = msgspec.field(default_factory=Queue)
    """The order in which chunks are evicted; see `Forest`."""
    promised: dict[Ordinal, bytes] = {}
    """Ordinal → key of the last chunk that the life's pending answer promised."""
    wanted: dict[Ordinal, bytes] = {}
    """Ordinal of a preempted life → key of the last whole chunk that the life had and will come back for."""
    copying: dict[JobId, bytes] = {}
    """Job id of a copy in flight → key of the last chunk that the copy reads or adds."""
    num_added: Count = 0
    """Number of times that chunks were added."""
    num_torn: Count = 0
    """Number of times that a change of the pool may have left chunks without the chunks before them."""

    def check(self) -> None:
        """Check that all held and queued chunks exist, and that parents are stored before their children.

        Raises:
            ValueError: a chunk is missing, or is stored before its parent.
        """
        known: set[bytes | None] = {None}
        for key, parent in self.parent_of.items():
            if parent not in known:
                raise ValueError("a chunk of the host pool is stored before its parent")
            known.add(key)
        held = chain(self.promised.values(), self.wanted.values(), self.copying.values())
        if not known.issuperset(chain(self.committed, held)) or not self.committed.keys() >= {*self.queue}:
            raise ValueError("a chunk is held or queued, but is not in the host pool")


class Victims(msgspec.Struct, frozen=True, gc=False):
    """Chunks to evict."""

    keys: Sequence[bytes]
    """In eviction order."""
    num_slots: int
    """Slots that become free."""


class Pool(Projection):
    """The chunks that can be looked up, and their holders.

    When a copy is settled, only its own chunks change. A promise belongs to the generation that got the answer.
    """

    def __init__(
        self,
        tracker: RequestTracker,
        geometry: Geometry,
        slots: HostSlots,
        jobs: Jobs,
        *,
        keep_for_preempted: bool,
        keeper: Callable[[], Callable[[bytes], bool] | None],
    ) -> None:
        """`keeper` returns a function (key → whether to evict the chunk last), or None if no extension has one."""
        self._tracker = tracker
        self._geometry = geometry
        self._jobs = jobs
        self.slots = slots
        self._keep_for_preempted = keep_for_preempted
        self._keeper = keeper
        self._packing = struct.Struct(f"<{geometry.pages_per_chunk}q")
        self.state = State()
        self.index()

    def check(self) -> None:
        """Check the state, and that each chunk has the right number of slots."""
        self.state.check()
        if any(len(packed) != self._packing.size for packed in self.state.committed.values()):
            raise ValueError("a chunk of the host pool has too few or too many slots")

    def index(self) -> None:
        """Recompute everything derived from the state and from the copies in flight."""
        state = self.state
        self.forest = Forest(state.parent_of, state.queue, state.committed)
        for holds in (state.promised, state.wanted, state.copying):
            for key in holds.values():
                self.forest.count_holder(key)
        saves = [copy for copy in self._jobs if copy.kind is CopyKind.SAVE and self._jobs.is_current(copy)]
        self._saved_by = {save.job_id: save.keys for save in saves}
        """Job id of a save in flight → keys of its chunks."""
        self._saving: dict[bytes, int] = {}
        """Key → number of saves in flight of its chunk."""
        for keys in self._saved_by.values():
            _count_up(self._saving, keys)

    def __len__(self) -> int:
        return len(self.state.committed)

    def __contains__(self, key: bytes) -> bool:
        return key in self.state.committed

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.state.committed)

    def get(self, key: bytes) -> tuple[int, ...] | None:
        """Return the slots of a chunk; None if the chunk cannot be looked up."""
        packed = self.state.committed.get(key)
        return None if packed is None else self._packing.unpack(packed)

    def slots_of(self, keys: Sequence[bytes]) -> tuple[int, ...] | None:
        """Return the slots of these chunks in order; None if a chunk cannot be looked up."""
        committed = self.state.committed
        if not all(map(committed.__contains__, keys)):
            return None
        return _unpacked(b"".join(map(committed.__getitem__, keys)))

    @property
    def promised(self) -> Mapping[str, Sequence[bytes]]:
        """Request id → chunks that the request's pending answer promised, from chunk 0 on."""
        return self._paths(self.state.promised)

    @property
    def wanted(self) -> Mapping[str, Sequence[bytes]]:
        """Request id → chunks that the preempted request had and will come back for, from chunk 0 on."""
        return self._paths(self.state.wanted)

    def _paths(self, holds: Mapping[int, bytes]) -> Mapping[str, Sequence[bytes]]:
        records = {ordinal: self._tracker.of(ordinal) for ordinal in holds}
        return {each.request_id: self.forest.path(holds[ordinal]) for ordinal, each in records.items() if each}

    def is_saving(self, key: bytes) -> bool:
        """Whether a save of the chunk is in flight."""
        return key in self._saving

    def unsaved(self, keys: Sequence[bytes], first_chunk: int, end_chunk: int) -> list[int]:
        """Return the numbers of the chunks in this range that are neither committed nor being saved."""
        saving, committed, keys = self._saving, self.state.committed, keys[first_chunk:end_chunk]
        if committed.keys().isdisjoint(keys) and saving.keys().isdisjoint(keys):  # a new prompt
            return list(range(first_chunk, end_chunk))
        return [chunk for chunk, key in enumerate(keys, first_chunk) if key not in committed and key not in saving]

    def num_committed(self, keys: Sequence[bytes], start: int = 0) -> int:
        """Return the number of keys before the first uncommitted one. The first `start` keys must be committed."""
        committed, end = self.state.committed, len(keys)
        while start < end and keys[start] in committed:
            start += 1
        return start

    # --- room ----------------------------------------------------------------------------------

    def victims(self, num_slots: int, keys: Sequence[bytes], end_chunk: int) -> Victims:
        """Return the chunks to evict to free this many slots. If that is impossible, return all chunks that may leave.

        Args:
            num_slots: slots needed beyond the free ones; if not positive, no chunk leaves.
            keys: chunk keys of the request that saves. Its chunks before `end_chunk` stay, because the first chunks of
                a prompt are worth more than later ones.
            end_chunk: number of the chunk after the last one that the request has saved or is saving.
        """
        if num_slots <= 0:
            return Victims((), 0)
        references, num_pages = self.slots.state.references, self._geometry.pages_per_chunk
        leaving = self.forest.leaving(self.forest.deepest(keys, end_chunk), self._keeper())
        victims: list[bytes] = []
        num_freed = 0
        num_left: dict[int, int] = {}
        """Slot → number of references that remain if the victims leave."""
        while num_freed < num_slots:
            # A chunk frees at most its own pages, so at least this many chunks must leave.
            more = list(islice(leaving, -(-(num_slots - num_freed) // num_pages)))
            if not more:
                break
            victims += more
            slots = _unpacked(b"".join(map(self.state.committed.__getitem__, more)))
            if _have_count_1(references, slots):
                num_freed += len(slots)
                continue
            for slot in slots:
                num_references = references.get(slot, 0)
                if num_references > 1:
                    num_left[slot] = num_references = num_left.get(slot, num_references) - 1
                    num_freed += not num_references
                else:
                    num_freed += num_references  # 0 for NO_SLOT, which has no references
        return Victims(victims, num_freed)

    # --- holders -------------------------------------------------------------------------------

    def _hold(self, holds: dict[int, bytes], holder: int, keys: Sequence[bytes], end_chunk: int) -> None:
        """Let the holder hold the first `end_chunk` chunks, instead of the chunks that it held before."""
        earlier = holds.pop(holder, None)
        key = self.forest.hold(keys, end_chunk)
        if key is not None:
            holds[holder] = key
        if earlier is not None:
            self.forest.let_go(earlier)

    def _let_go(self, holds: dict[int, bytes], holder: int) -> None:
        key = holds.pop(holder, None)
        if key is not None:
            self.forest.let_go(key)

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered, _sequence: int, subject: Subject) -> None:
        record = subject.current
        if record is not None:
            num_tokens = event.num_computed_tokens + event.num_external_tokens if event.num_external_tokens else 0
            end_chunk = min(-(-num_tokens // self._geometry.chunk_size), len(record.keys))
            key = record.keys[end_chunk - 1] if end_chunk > 0 else None
            if key != self.state.promised.get(record.ordinal):  # usually the same in each step
                self._hold(self.state.promised, record.ordinal, record.keys, end_chunk)

    @on(e.LookupDeferred)
    def _deferred(self, _event: e.LookupDeferred, _sequence: int, subject: Subject) -> None:
        if subject.current is not None:
            self._let_go(self.state.promised, subject.current.ordinal)

    @on(e.DecisionWithheld)
    def _withheld(self, event: e.DecisionWithheld, _sequence: int, _subject: Subject) -> None:
        record = self._tracker.get(event.request_id)
        if record is not None:
            self._let_go(self.state.promised, record.ordinal)

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted, _sequence: int, subject: Subject) -> None:
        record = subject.request
        if record is None:
            return
        self._let_go(self.state.promised, record.ordinal)
        if self._keep_for_preempted:
            num_chunks = self._geometry.num_chunks_in(num_intact_tokens(event))
            self._hold(self.state.wanted, record.ordinal, record.keys, num_chunks)
        self.forest.use(record.keys)

    @on(e.BlocksAllocated)
    def _allocated(self, _event: e.BlocksAllocated, _sequence: int, subject: Subject) -> None:
        self._relies_on_nothing(subject.request)

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived, _sequence: int, subject: Subject) -> None:
        self._relies_on_nothing(subject.request)
        for holds in (self.state.promised, self.state.wanted):  # a log may use an ordinal twice
            self._let_go(holds, event.ordinal)

    @on(e.RequestFinished)
    def _finished(self, _event: e.RequestFinished, _sequence: int, subject: Subject) -> None:
        self._relies_on_nothing(subject.request)
        if subject.request is not None:
            self.forest.use(subject.request.keys)

    @on(e.RequestReleased)
    def _released(self, _event: e.RequestReleased, _sequence: int, subject: Subject) -> None:
        self._relies_on_nothing(subject.current)

    def _relies_on_nothing(self, record: RequestRecord | None) -> None:
        if record is not None:
            self._let_go(self.state.promised, record.ordinal)
            self._let_go(self.state.wanted, record.ordinal)

    # --- loads ---------------------------------------------------------------------------------

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued, _sequence: int, subject: Subject) -> None:
        self.slots.acquire(event.slots)
        num_chunks = self._geometry.num_chunks_touched(event.first_token + event.num_tokens)
        self._hold(self.state.copying, event.job_id, _keys_of(subject), num_chunks)

    @on(e.TransferReported)
    def _reported(self, _event: e.TransferReported, _sequence: int, _subject: Subject) -> None:
        for copy in self._jobs.late_ends:
            self.slots.release(copy.slots, failed=True)

    @on(e.LoadCompleted, e.LoadFailed)
    def _load_settled(self, event: e.LoadCompleted | e.LoadFailed, _sequence: int, subject: Subject) -> None:
        load = subject.copy
        if load is not None and load.kind is CopyKind.LOAD:
            self.slots.release(load.slots)
        self._no_longer_saved_by(event.job_id)
        self._let_go(self.state.copying, event.job_id)

    # --- saves ---------------------------------------------------------------------------------

    @on(e.SaveIssued)
    def _save_issued(self, event: e.SaveIssued, _sequence: int, subject: Subject) -> None:
        self.slots.acquire(event.slots)
        keys = _keys_of(subject)
        self._no_longer_saved_by(event.job_id)  # a log may use a job id twice
        self._saved_by[event.job_id] = keys_at(event.chunks, keys)
        _count_up(self._saving, self._saved_by[event.job_id])
        self._hold(self.state.copying, event.job_id, keys, max(event.chunks, default=-1) + 1)

    def _no_longer_saved_by(self, job_id: int) -> None:
        _count_down(self._saving, self._saved_by.pop(job_id, ()))

    @on(e.TailSaveIssued)
    def _tail_save_issued(self, event: e.TailSaveIssued, _sequence: int, subject: Subject) -> None:
        self.slots.acquire(event.slots)
        num_chunks = self._geometry.num_chunks_in(event.first_token)
        self._hold(self.state.copying, event.job_id, _keys_of(subject), num_chunks)

    @on(e.SaveCompleted)
    def _save_completed(self, event: e.SaveCompleted, _sequence: int, subject: Subject) -> None:
        self._no_longer_saved_by(event.job_id)
        save = subject.copy
        if save is None:
            return
        if save.epoch != self._jobs.epoch:
            self.slots.release(save.slots)
            return
        if not self._store_whole(save):
            self._store_pages(save)
            self.slots.release(save.slots)
        self.state.num_added += 1
        if self._is_behind_a_gap(save):
            self.state.num_torn += 1
        self._let_go(self.state.copying, event.job_id)

    def _is_behind_a_gap(self, save: Copy) -> bool:
        """Whether the pool lacks the chunk before one of the save's chunks."""
        keys, chunks, committed = save.keys, save.chunks, self.state.committed
        is_run = len(keys) == len(chunks) > 1 and chunks == tuple(range(chunks[0], chunks[0] + len(chunks)))
        if is_run and committed.keys() >= {*keys}:
            keys = keys[:1]  # the others came with the chunks before them
        return not all(map(committed.__contains__, filter(None, map(self.forest.parent, keys))))

    def _store_whole(self, save: Copy) -> bool:
        """Add the save's chunks if each fills whole blocks and all pages were saved. Return whether they were added.

        The references of the save to its slots become references of the chunks.
        """
        keys, num_pages = save.keys, self._geometry.pages_per_chunk
        is_whole = len(keys) == len(save.chunks) and len(keys) * num_pages == len(save.slots)
        if not is_whole or self._geometry.chunks_share_blocks or NO_SLOT in save.slots:
            return False
        packed, num_bytes = _packed(save.slots), self._packing.size
        by_chunk = [packed[start : start + num_bytes] for start in range(0, len(packed), num_bytes)]
        if self.state.committed.keys().isdisjoint(keys) and self.state.parent_of.keys() >= {*keys}:
            self.state.committed.update(zip(keys, by_chunk, strict=True))
            return True
        for key, slots in zip(keys, by_chunk, strict=True):
            self._store(key, slots)
        return True

    def _store(self, key: bytes, packed: bytes) -> None:
        """Add a chunk in slots that already have a reference for it."""
        replaced = self.state.committed.get(key)
        if replaced is not None:
            self.slots.release(self._packing.unpack(replaced))
        self.state.committed[key] = packed
        self.forest.add(key)

    def _store_pages(self, save: Copy) -> None:
        pages = self._geometry.pages_for(save.chunks, len(save.slots))
        slot_of_page = dict(zip(pages, save.slots, strict=False))
        for chunk, key in dict(zip(save.chunks, save.keys, strict=False)).items():
            self._store_what_came(chunk, key, slot_of_page)
        for chunk, key in save.earlier_keys:
            if key in self.state.committed:  # the new page of this block has more tokens and contains these
                self._store_what_came(chunk, key, slot_of_page)

    def _store_what_came(self, chunk: int, key: bytes, slot_of_page: Mapping[int, int]) -> None:
        slots = self._geometry.slots_of(chunk, slot_of_page)
        if slots is not None and NO_SLOT in slots:
            slots = self._completed(slots, self.get(key))
        if slots is None:
            return  # the save has too few slots: folding must not fail, and lookups must not find the chunk
        self.slots.acquire(slots)
        self._store(key, _packed(slots))

    def _completed(self, slots: tuple[int, ...], stored: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Replace each missing slot (`NO_SLOT`) by the slot that the chunk already has for that page (`stored`).

        Returns None if a group without a window still lacks a page. A group with a window may lack pages that were
        outside the window when the chunk was saved.
        """
        if stored is not None and len(stored) == len(slots):
            slots = tuple(old if new == NO_SLOT else new for new, old in zip(slots, stored, strict=True))
        sizes = self._geometry.window_sizes
        missing = any(slot == NO_SLOT and not sizes[place % len(sizes)] for place, slot in enumerate(slots))
        return None if missing else slots

    @on(e.SaveFailed)
    def _save_failed(self, event: e.SaveFailed, _sequence: int, subject: Subject) -> None:
        self._no_longer_saved_by(event.job_id)
        self._let_go(self.state.copying, event.job_id)
        if subject.copy is not None and event.quiet:
            self.slots.release(subject.copy.slots, failed=True)

    # --- leaving -------------------------------------------------------------------------------

    @on(e.ChunksEvicted)
    def _evicted(self, event: e.ChunksEvicted, _sequence: int, _subject: Subject) -> None:
        self._drop(event.keys)
        self.forest.remove(event.keys)
        if not self.state.parent_of.keys().isdisjoint(event.keys):
            self.state.num_torn += 1

    @on(e.ChunksTainted)
    def _tainted(self, event: e.ChunksTainted, _sequence: int, _subject: Subject) -> None:
        self._drop(event.keys)
        for key in reversed(event.keys):
            self.forest.forget(key)
        self.state.num_torn += 1

    def _drop(self, keys: Iterable[bytes]) -> None:
        committed = self.state.committed
        self.slots.release(_unpacked(b"".join([committed.pop(key, b"") for key in keys])))

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset, _sequence: int, _subject: Subject) -> None:
        state = self.state
        self._drop(tuple(state.committed))
        for each in (state.parent_of, state.queue.order, state.promised, state.wanted, state.copying):
            each.clear()
        self.index()
        self._saving.clear()  # `jobs` may not have folded the reset yet
        self._saved_by.clear()


def _packed(slots: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(slots)}q", *slots)


def _unpacked(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 8}q", packed)


def _keys_of(subject: Subject) -> Sequence[bytes]:
    return () if subject.request is None else subject.request.keys


def _count_up(counts: dict[bytes, int], keys: Sequence[bytes]) -> None:
    if counts.keys().isdisjoint(keys):
        counts.update(dict.fromkeys(keys, 1))
        return
    for key in keys:
        if key in counts:
            counts[key] += 1
        else:
            counts[key] = 1


def _have_count_1(counts: Mapping[_T, int], keys: Sequence[_T]) -> bool:
    """Whether the keys are distinct and each has the count 1."""
    return len({*keys}) == len(keys) and {*map(counts.get, keys)} == {1}


def _count_down(counts: dict[bytes, int], keys: Sequence[bytes]) -> None:
    if _have_count_1(counts, keys):
        deque(map(counts.__delitem__, keys), 0)
        return
    for key in keys:
        count = counts.pop(key, 1)  # usually 1
        if count > 1:
            counts[key] = count - 1


def num_intact_tokens(event: e.RequestPreempted | e.RequestFinished) -> int:
    """Return how many settled tokens a copy can read if it runs before the next forward pass."""
    return 0 if event.blocks_zeroed else event.num_settled_tokens
