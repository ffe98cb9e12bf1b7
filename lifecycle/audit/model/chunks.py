"""What is in the host pool: chunk key -> slots, and why a chunk is not there any more.

Made from what save, evict, taint and reset events say, and from observed keys. The audit's own; see `lives.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.model.jobs import InFlight, JobsInFlight
from kvledger.lifecycle.audit.model.lives import Life, Seen
from kvledger.lifecycle.audit.model.moment import Moment
from kvledger.lifecycle.audit.model.slots import Slots
from kvledger.lifecycle.geometry import Geometry
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.windows import NO_SLOT

if TYPE_CHECKING:
    from kvledger.lifecycle.audit.model.start import Start


class Departed(NamedTuple):
    """Why a chunk that once was committed cannot be looked up, and the event that took it away."""

    reason: str
    sequence: int


class Chunks:
    """Chunks whose latest of commit, evict, taint and reset is commit, and the slots of each.

    To be folded after the jobs in flight, which say what was saved. Committed chunks and copies need their slots.
    """

    def __init__(self, jobs: JobsInFlight, geometry: Geometry, slots: Slots, moment: Moment) -> None:
        self._moment = moment
        self._jobs = jobs
        self._geometry = geometry
        self._pages_per_chunk = geometry.pages_per_chunk
        self._slots = slots
        self._committed: dict[bytes, tuple[int, ...]] = {}
        # The dict's own method, because it is asked often. So the dict is changed, never replaced.
        self.slots_of: Callable[[bytes], tuple[int, ...] | None] = self._committed.get
        """The slots that hold the chunk, or None where it is not committed."""
        self._saving: dict[bytes, int] = {}
        self.late: set[bytes] = set()
        """Chunks whose save was under way during the last reset and was completed after it: they are not committed."""
        self._departed: OrderedDict[bytes, Departed] = OrderedDict()
        self._max_departed = max(1024, 4 * slots.num_slots)
        self.departed: Callable[[bytes], Departed | None] = self._departed.get
        """Why the chunk is gone, as long as that is remembered."""
        self.num_added = 0
        """Saves that were committed."""
        self.num_removed = 0
        """Chunks that were taken away."""
        self.taken: list[int] | None = None
        """Slots of the save at hand that somebody needed already; None where all was well."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._committed

    @property
    def committed(self) -> Mapping[bytes, tuple[int, ...]]:
        """Every committed chunk and its slots."""
        return self._committed

    @property
    def saving(self) -> Container[bytes]:
        """Chunks that a save in flight will commit."""
        return self._saving

    def num_committed(self, life: Life) -> int:
        """How many chunks of the life are committed without a gap; most who ask ask again."""
        keys, seen, count = life.keys, life.seen, 0
        if not keys:
            return 0
        if (
            seen is not None
            and seen.num_removed == self.num_removed
            and seen.num_keys <= len(keys)
            and seen.last_key == keys[seen.num_keys - 1]
        ):
            if seen.num_added == self.num_added and seen.num_keys == len(keys):
                return seen.num_chunks
            count = seen.num_chunks
        for key in keys[count:]:
            if key not in self._committed:
                break
            count += 1
        life.seen = Seen(count, keys[-1], len(keys), self.num_added, self.num_removed)
        return count

    def unsaved(self, keys: Sequence[bytes], first_chunk: int, end_chunk: int) -> list[int]:
        """Of these chunks those that are neither committed nor being saved."""
        saving, committed = self._saving, self._committed
        return [
            chunk
            for chunk in range(first_chunk, end_chunk)
            if (key := keys[chunk]) not in committed and key not in saving
        ]

    def of_slot(self, slot: int) -> bytes | None:
        """A committed chunk that lies in the slot."""
        return next((key for key, slots in self._committed.items() if slot in slots), None)

    def begin(self, start: Start) -> None:
        """Take over what is committed, in flight or gone where an audit starts in the middle of a log."""
        self._committed.update(start.committed)
        self._departed.update(start.departed)
        for slots in self._committed.values():
            self._slots.hold(slots)
        for _, job in self._jobs:
            self._slots.hold(job.slots)
            if not job.is_load and job.epoch == self._jobs.epoch:
                self._count_saving(job)
        for job in self._jobs.given_up.values():
            self._slots.hold(job.slots)

    # --- copies ----------------------------------------------------------------------------------

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued) -> None:
        self._slots.hold(event.slots)

    @on(e.LoadCompleted, e.LoadFailed)
    def _load_settled(self, _event: e.LoadCompleted | e.LoadFailed) -> None:
        job = self._jobs.current
        if job is not None and job.is_load:
            self._slots.release(job.slots)

    @on(e.SaveIssued, e.TailSaveIssued)
    def _save_issued(self, event: e.SaveIssued | e.TailSaveIssued) -> None:
        self.taken = self._slots.hold_for_writing(event.slots)
        if self._jobs.current is not None:
            self._count_saving(self._jobs.current)

    def _count_saving(self, job: InFlight) -> None:
        saving = self._saving
        for key in job.keys:
            saving[key] = saving.get(key, 0) + 1

    def _no_longer_saving(self, job: InFlight) -> None:
        saving = self._saving
        for key in job.keys:
            left = saving.pop(key, 1) - 1
            if left:
                saving[key] = left

    @on(e.SaveFailed)
    def _failed(self, event: e.SaveFailed) -> None:
        job = self._jobs.current
        if job is not None and not job.is_load:
            if job.epoch == self._jobs.epoch:
                self._no_longer_saving(job)
            if event.quiet:
                self._slots.release(job.slots)

    @on(e.TransferReported)
    def _reported(self, _event: e.TransferReported) -> None:
        for job in self._jobs.let_go:
            self._slots.release(job.slots)

    @on(e.SaveCompleted)
    def _completed(self, _event: e.SaveCompleted) -> None:
        job = self._jobs.current
        if job is None or job.is_load:
            return
        slots, keys, num_pages = job.slots, job.keys, self._pages_per_chunk
        if job.epoch != self._jobs.epoch:
            self._slots.release(slots)
            self.late.update(keys)
            return
        self.num_added += 1
        self._no_longer_saving(job)
        num_keys = len(keys)
        if not num_pages or num_keys * num_pages != len(slots) or num_keys != len(job.chunks) or job.leaves_out:
            self._commit_pages(job)
            self._slots.release(slots)
        elif num_keys == 1:  # nearly always one chunk of whole blocks
            self._commit(keys[0], slots)
        else:
            first = 0
            for key in keys:  # the pages of such chunks lie one after the other
                self._commit(key, slots[first : first + num_pages])
                first += num_pages

    # --- chunks ----------------------------------------------------------------------------------

    def _commit(self, key: bytes, slots: tuple[int, ...]) -> None:
        """Let it lie in slots that are held for it already."""
        before = self._committed.get(key)
        if before is not None:
            self._slots.release(before)
        elif self._departed:
            self._departed.pop(key, None)
        self._committed[key] = slots

    def _commit_pages(self, job: InFlight) -> None:
        geometry = self._geometry
        slot_of_page = dict(zip(geometry.pages_of(job.chunks), job.slots, strict=False))
        # The new image of a block contains the shorter ones that other chunks had of it.
        replaced = [(chunk, key) for chunk, key in job.earlier_keys if key in self._committed]
        for chunk, key in [*zip(job.chunks, job.keys, strict=False), *replaced]:
            pages = geometry.pages_of((chunk,))
            slots = tuple(slot_of_page[page] for page in pages if page in slot_of_page)
            if len(slots) < len(pages):
                continue  # a save that names too few slots
            if NO_SLOT in slots:
                stored = self._committed.get(key, (NO_SLOT,) * len(slots))
                slots = tuple(old if new == NO_SLOT else new for new, old in zip(slots, stored, strict=False))
            # What every token sees must be there; a group with a window may lack pages.
            sizes = geometry.window_sizes
            if all(slot != NO_SLOT or sizes[place % len(sizes)] for place, slot in enumerate(slots)):
                self._slots.hold(slots)
                self._commit(key, slots)

    @on(e.ChunkEvicted)
    def _evicted(self, event: e.ChunkEvicted) -> None:
        self._remove(event.key, Departed("evicted", self._moment.sequence))

    @on(e.ChunkTainted)
    def _tainted(self, event: e.ChunkTainted) -> None:
        self._remove(event.key, Departed("tainted", self._moment.sequence))

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
        departed = self._departed
        departed.pop(key, None)
        departed[key] = why
        if len(departed) > self._max_departed:
            departed.popitem(last=False)
