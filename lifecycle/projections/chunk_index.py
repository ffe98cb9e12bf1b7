"""What is in the host pool: chunk key -> slots, and why a chunk is not there any more.

A chunk can be looked up from the moment its save is completed on every rank until it is evicted, tainted by
a failed load, or made stale by a reset. Recency is folded too: loads and saves renew it, lookups change
nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence

import attrs
import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.geometry import Geometry
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections.base import Projection, Subject
from kvledger.lifecycle.projections.host_slots import HostSlots
from kvledger.lifecycle.projections.recency import Recency
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.projections.room import Room
from kvledger.lifecycle.projections.tracker import RequestTracker
from kvledger.lifecycle.projections.transfers import Job, JobKind, Transfers
from kvledger.lifecycle.ranges import Count, LifeOrdinal, Slot
from kvledger.lifecycle.ranges import Sequence as SequenceNumber

_SHORT = 16
"""Chunks up to which a prefix is renewed with every one of them, for an eighth of it is no more than one."""


@attrs.frozen
class Departed:
    """Why and by which event a chunk left."""

    reason: e.MissReason
    sequence: SequenceNumber


class State(msgspec.Struct, forbid_unknown_fields=True):
    """What is there, and what was promised of it."""

    committed: dict[bytes, tuple[Slot, ...]] = {}
    """Every committed chunk and its slots."""
    by_age: Recency = msgspec.field(default_factory=Recency)
    """Committed chunks that nobody is sure to come back for, oldest first."""
    departed: dict[bytes, Departed] = {}
    """The longest gone first."""
    pinned_by: dict[LifeOrdinal, tuple[bytes, ...]] = {}
    """Ordinal of a life -> what its pending answer promised, by the keys that it had then."""
    wanted_by: dict[LifeOrdinal, tuple[bytes, ...]] = {}
    """Ordinal of a life -> what it will come back for, the same way."""
    num_added: Count = 0
    """How often chunks were added."""
    num_removed: Count = 0
    """How often a chunk was removed."""


class ChunkIndex(Projection):
    """Committed chunks, what nobody waits for in order of recency, and what is promised or waited for besides.

    A settlement concerns its job, a promise the generation that it was made to.
    """

    def __init__(
        self,
        tracker: RequestTracker,
        geometry: Geometry,
        slots: HostSlots,
        transfers: Transfers,
        *,
        keep_for_preempted: bool,
        kept_last: Callable[[], Collection[bytes]],
    ) -> None:
        """`kept_last` returns the keys of the chunks that are evicted after all others."""
        self._tracker = tracker
        self._geometry = geometry
        self._transfers = transfers
        self.slots = slots
        self._max_departed = max(1024, 4 * slots.num_slots)
        self._keep_for_preempted = keep_for_preempted
        self._kept_last = kept_last
        self.state = State()
        self.index()

    def index(self) -> None:
        """Make anew what follows from the state, and from the jobs in flight."""
        self._departed = self.state.departed = OrderedDict(self.state.departed)
        self._pins: dict[bytes, int] = {}
        self._wanted: dict[bytes, int] = {}
        self._saving: dict[bytes, int] = {}
        for keys in self.state.pinned_by.values():
            _count_up(self._pins, keys)
        for keys in self.state.wanted_by.values():
            _count_up(self._wanted, keys)
        for job in self._transfers:
            if job.kind is JobKind.SAVE and self._transfers.is_current(job):
                _count_up(self._saving, job.keys)

    def __len__(self) -> int:
        return len(self.state.committed)

    def get(self, key: bytes) -> tuple[int, ...] | None:
        """The slots of a committed chunk, or None."""
        return self.state.committed.get(key)

    @property
    def promised(self) -> Mapping[str, tuple[bytes, ...]]:
        """Request id -> the chunks that its pending answer promised."""
        return self._by_request(self.state.pinned_by)

    @property
    def wanted(self) -> Mapping[str, tuple[bytes, ...]]:
        """Request id -> the chunks that it was preempted with and will come back for."""
        return self._by_request(self.state.wanted_by)

    def _by_request(self, keys_of: Mapping[int, tuple[bytes, ...]]) -> Mapping[str, tuple[bytes, ...]]:
        records = ((self._tracker.of(ordinal), keys) for ordinal, keys in keys_of.items())
        return {record.request_id: keys for record, keys in records if record is not None}

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
        return key in self._pins or self._transfers.is_any_read(slots)

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
        if keys != self.state.pinned_by.get(event.ordinal, ()):
            self._unpin(event.ordinal)
            if keys:
                _count_up(self._pins, keys)
                self.state.pinned_by[event.ordinal] = keys

    @on(e.LookupDeferred)
    def _deferred(self, event: e.LookupDeferred, _sequence: int, subject: Subject) -> None:
        if subject.current is not None:
            self._unpin(event.ordinal)

    @on(e.DecisionWithheld)
    def _withheld(self, event: e.DecisionWithheld, _sequence: int, _subject: Subject) -> None:
        self._unpin(self._tracker.ordinal(event.request_id))

    def _unpin(self, ordinal: int) -> None:
        keys = self.state.pinned_by.pop(ordinal, None)
        if keys is not None:
            _count_down(self._pins, keys)

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
        ordinal = record.ordinal
        self._unpin(ordinal)
        self._renew(record, len(record.keys))
        if self._keep_for_preempted:
            self._no_longer_want(ordinal)
            wanted = tuple(record.keys[: self._geometry.num_chunks_in(event.num_intact_tokens)])
            _count_up(self._wanted, wanted)
            self.state.wanted_by[ordinal] = wanted
            for key in wanted:
                self.state.by_age.discard(key)

    @on(e.BlocksAllocated, e.RequestArrived)
    def _allocated(
        self, _event: e.BlocksAllocated | e.RequestArrived | e.RequestFinished, _sequence: int, subject: Subject
    ) -> None:
        if subject.request is not None:
            self._unpin(subject.request.ordinal)
            self._no_longer_want(subject.request.ordinal)

    @on(e.RequestFinished)
    def _finished(self, event: e.RequestFinished, sequence: int, subject: Subject) -> None:
        self._allocated(event, sequence, subject)
        if subject.request is not None:
            self._renew(subject.request, len(subject.request.keys))

    def _no_longer_want(self, ordinal: int) -> None:
        keys = self.state.wanted_by.pop(ordinal, None)
        if keys is not None:
            _count_down(self._wanted, keys)
            self.state.by_age.add(self._unwanted(keys))

    @on(e.TransferReported)
    def _reported(self, event: e.TransferReported, _sequence: int, _subject: Subject) -> None:
        for job in filter(None, map(self._transfers.given_up, dict.fromkeys(event.job_ids))):
            if self._transfers.is_reported(job, event):
                # The last rank that could still have written them is done.
                self.slots.release(job.slots, failed=job.kind is JobKind.SAVE)

    @on(e.LoadCompleted, e.LoadFailed)
    def _load_settled(self, event: e.LoadCompleted | e.LoadFailed, _sequence: int, _subject: Subject) -> None:
        job = self._transfers.get(event.job_id)
        if job is not None and job.kind is JobKind.LOAD:
            self.slots.release(job.slots)

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
    def _save_completed(self, event: e.SaveCompleted, _sequence: int, _subject: Subject) -> None:
        job = self._transfers.get(event.job_id)
        if job is None:
            return
        if job.epoch != self._transfers.epoch:
            self.slots.release(job.slots)
            return
        _count_down(self._saving, job.keys)
        if not self._place_whole(job):
            self._place_pages(job)
            self.slots.release(job.slots)
        # A growing request's beginning must not look older than its end. Renewing it whenever it has grown by an
        # eighth keeps the cost per chunk constant.
        first = job.chunks[0] if job.chunks else 0
        if first and (first < _SHORT or first % (first // 8) == 0):
            self._renew(self._tracker.of(job.ordinal), first)
        self.state.num_added += 1

    def _place_whole(self, job: Job) -> bool:
        """Let chunks that are whole blocks be found, if every one is complete; else return False.

        The save's references on its slots go over to the chunks.
        """
        keys = job.keys
        slots_by_chunk = self._geometry.slots_by_chunk(job.slots, len(keys))
        if slots_by_chunk is None or len(keys) != len(job.chunks) or NO_SLOT in job.slots:
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

    def _place_pages(self, job: Job) -> None:
        pages = self._geometry.pages_for(job.chunks, len(job.slots))
        slot_of_page = dict(zip(pages, job.slots, strict=False))
        for chunk, key in reversed(dict(zip(job.chunks, job.keys, strict=False)).items()):
            self._place(chunk, key, slot_of_page)
        for chunk, key in reversed(job.earlier_keys):
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
    def _save_failed(self, event: e.SaveFailed, _sequence: int, _subject: Subject) -> None:
        job = self._transfers.get(event.job_id)
        if job is None:
            return
        if self._transfers.is_current(job):
            _count_down(self._saving, job.keys)
        if event.quiet:
            self.slots.release(job.slots, failed=True)

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
        self._saving.clear()
        self._wanted.clear()
        self.state.wanted_by.clear()
        self._pins.clear()
        self.state.pinned_by.clear()

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
