"""EVICT_IDLE_ONLY: a chunk that a load reads is not evicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import JOB_ISSUED, JOB_SETTLED, Violation, violation
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.projections.host_slots import NO_SLOT
from kvledger.lifecycle.projections.transfers import Job
from kvledger.lifecycle.replay import ReplayedEvent


class EvictIdleOnly:
    """No load in flight reads the slots that an evicted chunk gives up.

    Verifies: this for every eviction, with slots folded from saves and loads.
    Does not verify: taints and resets, which take chunks away from whoever reads them by design; chunks that were
    promised and not taken up yet (HIT_PINNED).
    """

    rule: ClassVar[str] = "EVICT_IDLE_ONLY"
    looks_at: ClassVar[frozenset[type[e.Event]]] = frozenset({*JOB_ISSUED, *JOB_SETTLED, e.ChunkEvicted})

    def __init__(self) -> None:
        self._loads: dict[int, tuple[int, set[bytes]]] = {}
        """Job id -> (sequence of the load, keys of the chunks whose slots it reads)."""
        self._saves: dict[int, Job] = {}

    def check(self, step: ReplayedEvent, projections: Projections) -> Iterator[Violation]:
        """Look for a load that needs the evicted chunk."""
        event = step.event
        if isinstance(event, e.ChunkEvicted):
            for job_id, (sequence, read) in self._loads.items():
                if event.key in read:
                    detail = f"chunk {event.key.hex()} was evicted, though load {job_id} is still reading it"
                    request_id = event.for_request_id
                    yield violation(self.rule, step, projections, detail, sequence, event.cause, request_id=request_id)
        elif isinstance(event, e.LoadIssued | e.SaveIssued | e.TailSaveIssued):
            self._start(event, step.sequence, projections)
        elif isinstance(event, e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed):
            self._loads.pop(event.job_id, None)
            self._replace(self._saves.pop(event.job_id, None))

    def _start(
        self, event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued, sequence: int, projections: Projections
    ) -> None:
        job = projections.transfers.get(event.job_id)
        if job is not None and isinstance(event, e.LoadIssued):
            # A chunk may also lie in a shorter image of the same block; the load does not read that one.
            slots_of, read = projections.chunks.get, frozenset(event.slots) - {NO_SLOT}
            self._loads[event.job_id] = (sequence, {k for k in job.keys if not read.isdisjoint(slots_of(k) or ())})
        elif job is not None:
            self._saves[event.job_id] = job

    def _replace(self, save: Job | None) -> None:
        """Chunks of a settled save may have moved to a longer image; loads in flight still read the shorter."""
        if save is not None:
            for _, keys in self._loads.values():
                keys.difference_update(save.keys, (key for _, key in save.earlier_keys))
