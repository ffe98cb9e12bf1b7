"""EVICT_IDLE_ONLY: a chunk that a load reads is not evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.jobs import InFlight, JobsInFlight
from kvledger.lifecycle.audit.model.moment import Check, Moment
from kvledger.lifecycle.audit.model.start import Start
from kvledger.lifecycle.windows import NO_SLOT


class EvictIdleOnly:
    """No load in flight reads the slots that an evicted chunk gives up.

    Verifies: this for every eviction, with slots folded from saves and loads.
    Does not verify: taints and resets, which take chunks away from whoever reads them by design; chunks that were
    promised and not taken up yet (HIT_PINNED).
    """

    rule: ClassVar[str] = "EVICT_IDLE_ONLY"

    def __init__(self) -> None:
        self._jobs: JobsInFlight
        self._slots_of: Callable[[bytes], tuple[int, ...] | None]
        self._loads: dict[int, tuple[int, set[bytes]]] = {}
        """Job id -> (sequence of the load, keys of the chunks whose slots it reads)."""

    def begin(self, _start: Start) -> None:
        """Take over what loads in flight read."""
        for job_id, job in self._jobs:
            if job.is_load:
                self._loads[job_id] = (0, self._keys_read_by(job))

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._jobs, self._slots_of = model.jobs, model.chunks.slots_of
        return [
            (e.ChunkEvicted, self._evicted),
            (e.LoadIssued, self._load_issued),
            (e.LoadCompleted, self._settled),
            (e.LoadFailed, self._settled),
            (e.SaveCompleted, self._settled),
            (e.SaveFailed, self._settled),
        ]

    def _evicted(self, event: e.ChunkEvicted, moment: Moment) -> Iterator[Violation] | None:
        return self._check_eviction(event, moment) if self._loads else None

    def _load_issued(self, event: e.LoadIssued, moment: Moment) -> None:
        if self._jobs.current is not None:
            self._loads[event.job_id] = (moment.sequence, self._keys_read_by(self._jobs.current))

    def _keys_read_by(self, load: InFlight) -> set[bytes]:
        # A chunk may also lie in a shorter image of the same block; the load does not read that one.
        slots_of, read = self._slots_of, frozenset(load.slots) - {NO_SLOT}
        return {key for key in load.keys if not read.isdisjoint(slots_of(key) or ())}

    def _settled(
        self,
        event: e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed,
        moment: Moment,
    ) -> None:
        if self._loads:
            self._loads.pop(event.job_id, None)
            job = self._jobs.current
            if job is not None and not job.is_load:
                # Chunks of a settled save may have moved to a longer image; loads in flight still read the shorter.
                for _, keys in self._loads.values():
                    keys.difference_update(job.keys, (key for _, key in job.earlier_keys))

    def _check_eviction(self, event: e.ChunkEvicted, moment: Moment) -> Iterator[Violation]:
        for job_id, (sequence, read) in self._loads.items():
            if event.key in read:
                detail = f"chunk {event.key.hex()} was evicted, though load {job_id} is still reading it"
                yield violation(self.rule, moment, detail, sequence, event.cause)
