"""EVICT_IDLE_ONLY: a chunk that a load reads is not evicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.transfers import JobKind
from kvledger.lifecycle.replay import Check, ReplayedEvent
from kvledger.lifecycle.windows import NO_SLOT


class EvictIdleOnly:
    """No load in flight reads the slots that an evicted chunk gives up.

    Verifies: this for every eviction, with slots folded from saves and loads.
    Does not verify: taints and resets, which take chunks away from whoever reads them by design; chunks that were
    promised and not taken up yet (HIT_PINNED).
    """

    rule: ClassVar[str] = "EVICT_IDLE_ONLY"

    def __init__(self) -> None:
        self._loads: dict[int, tuple[int, set[bytes]]] = {}
        """Job id -> (sequence of the load, keys of the chunks whose slots it reads)."""

    def begin(self, projections: Projections) -> None:
        """Take over what loads in flight read."""
        for job in projections.transfers:
            if job.kind is JobKind.LOAD:
                slots_of, read = projections.chunks.get, frozenset(job.slots) - {NO_SLOT}
                keys_read = {key for key in job.keys if not read.isdisjoint(slots_of(key) or ())}
                self._loads[job.job_id] = (0, keys_read)

    def checks(self, _model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        return [
            (e.ChunkEvicted, self._evicted),
            (e.LoadIssued, self._load_issued),
            (e.LoadCompleted, self._settled),
            (e.LoadFailed, self._settled),
            (e.SaveCompleted, self._settled),
            (e.SaveFailed, self._settled),
        ]

    def _evicted(
        self, event: e.ChunkEvicted, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation] | None:
        return self._check_eviction(event, step, projections) if self._loads else None

    def _load_issued(self, event: e.LoadIssued, step: ReplayedEvent, projections: Projections) -> None:
        if step.job is not None:
            # A chunk may also lie in a shorter image of the same block; the load does not read that one.
            slots_of, read = projections.chunks.get, frozenset(event.slots) - {NO_SLOT}
            keys = {key for key in step.job.keys if not read.isdisjoint(slots_of(key) or ())}
            self._loads[event.job_id] = (step.sequence, keys)

    def _settled(
        self,
        event: e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed,
        step: ReplayedEvent,
        _projections: Projections,
    ) -> None:
        if self._loads:
            self._loads.pop(event.job_id, None)
            if step.job is not None and step.job.kind is JobKind.SAVE:
                # Chunks of a settled save may have moved to a longer image; loads in flight still read the shorter.
                for _, keys in self._loads.values():
                    keys.difference_update(step.job.keys, (key for _, key in step.job.earlier_keys))

    def _check_eviction(
        self, event: e.ChunkEvicted, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation]:
        for job_id, (sequence, read) in self._loads.items():
            if event.key in read:
                detail = f"chunk {event.key.hex()} was evicted, though load {job_id} is still reading it"
                yield violation(self.rule, step, projections, detail, sequence, event.cause)
