"""Chunks in the host pool: key → slots, and why other chunks have left the pool.

Computed from save, evict, taint and reset events, and from observed keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import takewhile

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.copies import Copies
from kvledger.lifecycle.reader.layout import Layout
from kvledger.lifecycle.reader.moment import Moment
from kvledger.lifecycle.reader.records import Copy, Departed, Life
from kvledger.lifecycle.reader.slots import Slots


class StoredChunks(msgspec.Struct, forbid_unknown_fields=True):
    """State of `Chunks`, as plain values."""

    committed: dict[bytes, tuple[int, ...]]
    departed: dict[bytes, Departed]
    """Key → why the chunk was removed, in the order of removals."""
    late: list[bytes]
    num_added: int
    num_removed: int


class Chunks:
    """Committed chunks and their slots.

    A chunk becomes committed when its save completes. It stays committed until it is evicted, tainted or reset.
    Fold this after the copies, because they have the job that an event settles. Committed chunks and copies in flight
    hold their slots.
    """

    def __init__(self, copies: Copies, layout: Layout, slots: Slots, moment: Moment) -> None:
        self._moment = moment
        self._copies = copies
        self._layout = layout
        self._slots = slots
        self._committed: dict[bytes, tuple[int, ...]] = {}
        self._saving: dict[bytes, int] = {}
        self.late: set[bytes] = set()
        """Chunks whose save was in flight during the last reset and completed later. They are not committed."""
        self._departed: OrderedDict[bytes, Departed] = OrderedDict()
        self._max_departed = max(1024, 4 * slots.num_slots)
        self.num_added = 0
        """Number of committed saves."""
        self.num_removed = 0
        """Number of removed chunks."""
        self.evicted: Mapping[bytes, tuple[int, ...]] = {}
        """Key of a chunk in the last `chunks.evicted` → the slots that the chunk had."""
        self.taken: list[int] = []
        """Slots of the current save that were not free."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._committed

    def slots_of(self, key: bytes) -> tuple[int, ...] | None:
        """Return the chunk's slots; None if it is not committed."""
        return self._committed.get(key)

    def departed(self, key: bytes) -> Departed | None:
        """Return why the chunk was removed; None if it was not removed, or if the reason is no longer remembered."""
        return self._departed.get(key)

    @property
    def committed(self) -> Mapping[bytes, tuple[int, ...]]:
        """Key of a committed chunk → its slots."""
        return self._committed

    @property
    def saving(self) -> Container[bytes]:
        """Chunks that a save in flight will commit."""
        return self._saving

    def num_committed(self, life: Life) -> int:
        """Return how many chunks of the life are committed before the first uncommitted one."""
        return len(list(takewhile(self._committed.__contains__, life.keys)))

    def unsaved(self, keys: Sequence[bytes], first_chunk: int, end_chunk: int) -> list[int]:
        """Return the numbers of the chunks in this range that are neither committed nor being saved."""
        chunks = range(first_chunk, end_chunk)
        return [each for each in chunks if keys[each] not in self._committed and keys[each] not in self._saving]

    def in_slots(self, slots: Iterable[int]) -> Mapping[int, bytes]:
        """Slot → key of a committed chunk in it; slots without one are left out. Slow: it visits every chunk."""
        wanted = frozenset(slots)
        return {slot: key for key, its in self._committed.items() for slot in wanted.intersection(its)}

    def stored(self) -> StoredChunks:
        """Return the state."""
        return StoredChunks(
            dict(self._committed), dict(self._departed), sorted(self.late), self.num_added, self.num_removed
        )

    def resume(self, stored: StoredChunks) -> None:
        """Restore a stored state. Call this after the copies and the slots have resumed."""
        self._committed, self._departed = dict(stored.committed), OrderedDict(stored.departed)
        self.late = set(stored.late)
        self.num_added, self.num_removed = stored.num_added, stored.num_removed
        for _, job in self._copies:
            if not job.is_load and job.epoch == self._copies.epoch:
                self._count_saving(job)

    def lost(self) -> None:
        """Forget the chunks, because events are missing."""
        self._committed.clear()
        self._saving.clear()
        self._departed.clear()
        self.late.clear()
        self.evicted, self.taken = {}, []

    # --- copies ----------------------------------------------------------------------------------

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued) -> None:
        self._slots.hold(event.slots)

    @on(e.LoadCompleted, e.LoadFailed)
    def _load_settled(self, _event: e.LoadCompleted | e.LoadFailed) -> None:
        job = self._copies.current
        if job is not None and job.is_load:
            self._slots.release(job.slots)

    @on(e.SaveIssued, e.TailSaveIssued)
    def _save_issued(self, event: e.SaveIssued | e.TailSaveIssued) -> None:
        self.taken = self._slots.hold_for_writing(event.slots)
        if self._copies.current is not None:
            self._count_saving(self._copies.current)

    def _count_saving(self, job: Copy) -> None:
        for key in job.keys:
            self._saving[key] = self._saving.get(key, 0) + 1

    def _no_longer_saving(self, job: Copy) -> None:
        for key in job.keys:
            left = self._saving.pop(key, 0) - 1
            if left > 0:
                self._saving[key] = left

    @on(e.SaveFailed)
    def _failed(self, event: e.SaveFailed) -> None:
        job = self._copies.current
        if job is not None and not job.is_load:
            if job.epoch == self._copies.epoch:
                self._no_longer_saving(job)
            if event.quiet:
                self._slots.release(job.slots)

    @on(e.TransferReported)
    def _reported(self, _event: e.TransferReported) -> None:
        for job in self._copies.let_go:
            self._slots.release(job.slots)

    @on(e.SaveCompleted)
    def _completed(self, _event: e.SaveCompleted) -> None:
        job = self._copies.current
        if job is None or job.is_load:
            return
        if job.epoch != self._copies.epoch:
            self._slots.release(job.slots)
            self.late.update(job.keys)
            return
        self.num_added += 1
        self._no_longer_saving(job)
        num_pages, is_shared = self._layout.num_pages_of_chunk, self._layout.chunk_shares_block
        if not is_shared and len(job.keys) * num_pages == len(job.slots) and not job.leaves_out:
            for number, key in enumerate(job.keys):  # their pages follow one another
                self._commit(key, job.slots[number * num_pages : (number + 1) * num_pages])
        else:
            self._commit_pages(job)
            self._slots.release(job.slots)

    # --- chunks ----------------------------------------------------------------------------------

    def _commit(self, key: bytes, slots: tuple[int, ...]) -> None:
        """Commit the chunk in slots that are held for it already."""
        if key in self._committed:
            self._slots.release(self._committed[key])
        self._departed.pop(key, None)
        self._committed[key] = slots

    def _commit_pages(self, job: Copy) -> None:
        layout = self._layout
        slot_of_page = dict(zip(layout.pages_of_chunks(job.chunks, len(job.slots)), job.slots, strict=False))
        # The new image of a block contains the shorter images of the same block that other chunks had.
        replaced = [(chunk, key) for chunk, key in job.earlier_keys if key in self._committed]
        for chunk, key in [*dict(zip(job.chunks, job.keys, strict=False)).items(), *replaced]:
            pages = layout.pages_of_chunk(chunk)
            if not all(page in slot_of_page for page in pages):
                continue  # a save that names too few slots
            slots = tuple([slot_of_page[page] for page in pages])
            if NO_SLOT in slots:
                stored = self._committed.get(key, (NO_SLOT,) * len(slots))
                slots = tuple(old if new == NO_SLOT else new for new, old in zip(slots, stored, strict=False))
                # A group with a window may lack pages, any other may not.
                windows = layout.windows
                if any(
                    slot == NO_SLOT and not windows[page % len(windows)]
                    for page, slot in zip(pages, slots, strict=True)
                ):
                    continue
            self._slots.hold(slots)
            self._commit(key, slots)

    @on(e.ChunksEvicted)
    def _evicted(self, event: e.ChunksEvicted) -> None:
        self.evicted = {key: self._committed.get(key, ()) for key in event.keys}
        for key in event.keys:
            self._remove(key, Departed("evicted", self._moment.sequence))

    @on(e.ChunksTainted)
    def _tainted(self, event: e.ChunksTainted) -> None:
        for key in event.keys:
            self._remove(key, Departed("tainted", self._moment.sequence))

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset) -> None:
        why = Departed("reset", self._moment.sequence)
        for key in tuple(self._committed):
            self._remove(key, why)
        self._saving.clear()
        self.late.clear()

    def _remove(self, key: bytes, why: Departed) -> None:
        slots = self._committed.pop(key, None)
        if slots is None:
            return
        self._slots.release(slots)
        self.num_removed += 1
        self._departed[key] = why
        self._departed.move_to_end(key)
        if len(self._departed) > self._max_departed:
            self._departed.popitem(last=False)
