"""EVICT_IDLE_ONLY: a chunk that a load reads is not evicted."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.jobs import InFlight
from kvledger.lifecycle.audit.model.moment import on
from kvledger.lifecycle.audit.model.start import Start
from kvledger.lifecycle.windows import NO_SLOT


class EvictIdleOnly(Checker):
    """No load in flight reads the slots that an evicted chunk gives up.

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

    @on(e.ChunkEvicted)
    def _evicted(self, event: e.ChunkEvicted) -> None:
        for job_id, (sequence, read) in self._loads.items():
            if event.key in read:
                detail = f"chunk {event.key.hex()} was evicted, though load {job_id} is still reading it"
                self.broken(detail, sequence, event.cause)

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued) -> None:
        if self.jobs.current is not None:
            self._loads[event.job_id] = (self.moment.sequence, self._keys_read_by(self.jobs.current))

    def _keys_read_by(self, load: InFlight) -> set[bytes]:
        # A chunk may also lie in a shorter image of the same block; the load does not read that one.
        slots_of, read = self.chunks.slots_of, frozenset(load.slots) - {NO_SLOT}
        return {key for key in load.keys if not read.isdisjoint(slots_of(key) or ())}

    @on(e.LoadCompleted, e.LoadFailed, e.SaveCompleted, e.SaveFailed)
    def _settled(self, event: e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed) -> None:
        if self._loads:
            self._loads.pop(event.job_id, None)
            job = self.jobs.current
            if job is not None and not job.is_load:
                # Chunks of a settled save may have moved to a longer image; loads in flight still read the shorter.
                for _, keys in self._loads.values():
                    keys.difference_update(job.keys, (key for _, key in job.earlier_keys))
