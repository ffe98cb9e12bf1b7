"""A chunk index of the audit's own, made from save, evict, taint and reset events alone.

It is kept apart from `projections/chunk_index.py` on purpose: a mistake there must not hide itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.jobs_in_flight import JobsInFlight
from kvledger.lifecycle.geometry import Geometry
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.host_slots import NO_SLOT
from kvledger.lifecycle.projections.transfers import Job
from kvledger.lifecycle.replay import Check, ReplayedEvent


class CommittedChunks:
    """Chunks whose latest of commit, evict, taint and reset is commit, and the slots of each.

    To be folded after the jobs in flight, which say what was saved.
    """

    def __init__(self, jobs: JobsInFlight, geometry: Geometry) -> None:
        self._jobs = jobs
        self._geometry = geometry
        self._pages_per_chunk = geometry.pages_per_chunk
        self._slots: dict[bytes, tuple[int, ...]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def slots_of(self, key: bytes) -> tuple[int, ...] | None:
        """The slots that hold the chunk, or None where it is not committed."""
        return self._slots.get(key)

    def begin(self, projections: Projections) -> None:
        """Take over what is committed."""
        self._slots = dict(projections.chunks.committed)

    def folds(self) -> Iterable[tuple[type[e.Event], Check]]:
        """(event class, fold), to be done as checks are; they never find anything."""
        return [
            (e.SaveCompleted, self._completed),
            (e.ChunkEvicted, self._removed),
            (e.ChunkTainted, self._removed),
            (e.CacheReset, self._reset),
        ]

    def _removed(self, event: e.ChunkEvicted | e.ChunkTainted, _step: ReplayedEvent, _projections: Projections) -> None:
        self._slots.pop(event.key, None)

    def _reset(self, _event: e.CacheReset, _step: ReplayedEvent, _projections: Projections) -> None:
        self._slots.clear()

    def _completed(self, _event: e.SaveCompleted, _step: ReplayedEvent, _projections: Projections) -> None:
        in_flight = self._jobs.current
        if in_flight is None or in_flight.is_load or in_flight.epoch != self._jobs.epoch or in_flight.job is None:
            return
        job = in_flight.job
        slots, keys, num_pages = job.slots, job.keys, self._pages_per_chunk
        num_keys = len(keys)
        if not num_pages or num_keys * num_pages != len(slots) or num_keys != len(job.chunks) or in_flight.leaves_out:
            self._commit_pages(job)
        elif num_keys == 1:  # nearly always one chunk of whole blocks
            self._slots[keys[0]] = slots
        else:
            first = 0
            for key in keys:  # the pages of such chunks lie one after the other
                self._slots[key] = slots[first : first + num_pages]
                first += num_pages

    def _commit_pages(self, job: Job) -> None:
        geometry = self._geometry
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
