"""A chunk index of the audit's own, made from save, evict, taint and reset events alone.

It is kept apart from `projections/chunk_index.py` on purpose: a mistake there must not hide itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvledger.lifecycle import events as e
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.projections.host_slots import NO_SLOT
from kvledger.lifecycle.projections.transfers import Job, JobKind
from kvledger.lifecycle.replay import Check, ReplayedEvent


class CommittedChunks:
    """Chunks whose latest of commit, evict, taint and reset is commit, and the slots of each."""

    def __init__(self) -> None:
        self.epoch = 0
        """Resets so far."""
        self._saves: dict[int, tuple[Job, int]] = {}
        self._slots: dict[bytes, tuple[int, ...]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def slots_of(self, key: bytes) -> tuple[int, ...] | None:
        """The slots that hold the chunk, or None where it is not committed."""
        return self._slots.get(key)

    def begin(self, projections: Projections) -> None:
        """Take over what is committed, and the saves in flight that no reset has made stale."""
        self.epoch = projections.transfers.epoch
        self._slots = dict(projections.chunks.committed)
        for job in projections.transfers:
            if job.kind is JobKind.SAVE and projections.transfers.is_current(job):
                self._saves[job.job_id] = (job, self.epoch)

    def folds(self) -> Iterable[tuple[type[e.Event], Check]]:
        """(event class, fold), to be done as checks are; they never find anything."""
        return [
            (e.SaveIssued, self._issued),
            (e.SaveCompleted, self._completed),
            (e.SaveFailed, self._failed),
            (e.ChunkEvicted, self._removed),
            (e.ChunkTainted, self._removed),
            (e.CacheReset, self._reset),
        ]

    def _removed(self, event: e.ChunkEvicted | e.ChunkTainted, _step: ReplayedEvent, _projections: Projections) -> None:
        self._slots.pop(event.key, None)

    def _issued(self, event: e.SaveIssued, step: ReplayedEvent, _projections: Projections) -> None:
        if step.job is not None:
            self._saves[event.job_id] = (step.job, self.epoch)

    def _failed(self, event: e.SaveFailed, _step: ReplayedEvent, _projections: Projections) -> None:
        self._saves.pop(event.job_id, None)

    def _reset(self, _event: e.CacheReset, _step: ReplayedEvent, _projections: Projections) -> None:
        self.epoch += 1
        self._slots.clear()

    def _completed(self, event: e.SaveCompleted, _step: ReplayedEvent, projections: Projections) -> None:
        job, epoch = self._saves.pop(event.job_id, (None, 0))
        if job is None or epoch != self.epoch:
            return
        geometry = projections.geometry
        slots = job.slots
        if len(job.keys) == len(job.chunks) == 1 and len(slots) == geometry.pages_per_chunk and NO_SLOT not in slots:
            self._slots[job.keys[0]] = slots  # one chunk of whole blocks, and nothing else
            return
        slot_of_page = dict(zip(geometry.pages_of(job.chunks), job.slots, strict=False))
        # The new image of a block contains the shorter ones that other chunks had of it.
        replaced = [(chunk, key) for chunk, key in job.earlier_keys if key in self._slots]
        for chunk, key in [*zip(job.chunks, job.keys, strict=False), *replaced]:
            slots = tuple(slot_of_page[page] for page in geometry.pages_of((chunk,)) if page in slot_of_page)
            if NO_SLOT not in slots:
                self._slots[key] = slots
                continue
            stored = self._slots.get(key, (NO_SLOT,) * len(slots))
            merged = tuple(old if new == NO_SLOT else new for new, old in zip(slots, stored, strict=False))
            # What every token sees must be there; a group with a window may lack pages.
            if all(
                slot != NO_SLOT or geometry.window_sizes[i % len(geometry.window_sizes)]
                for i, slot in enumerate(merged)
            ):
                self._slots[key] = merged
