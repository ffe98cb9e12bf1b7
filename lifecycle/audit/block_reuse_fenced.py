"""BLOCK_REUSE_FENCED: nobody is given a block that a copy for another request still reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.transfers import JobKind
from kvledger.lifecycle.replay import Check, ReplayedEvent
from kvledger.lifecycle.states import BlocksRegion, RequestState, SourceRegion
from kvledger.lifecycle.windows import NULL_BLOCK


class BlockReuseFenced:
    """Blocks that are given to be filled are not those of a save beside the steps which no step waits for.

    Verifies: this for every block that an allocation or a step gives, beyond what is shared from the prefix cache,
    where the log says that the save's request still has the block, or that it is held for the save.
    Does not verify: blocks that the request has lost (SRC_BLOCK_STABLE), saves within a step, and the order of copies
    and forwards on the device.
    """

    rule: ClassVar[str] = "BLOCK_REUSE_FENCED"

    def __init__(self) -> None:
        self._read_by: dict[int, int] = {}
        """Block id -> job id of a save beside the steps."""
        self._saves: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Job id -> (sequence, blocks)."""
        self._num_own: dict[str, int] = {}
        """Request id -> blocks at the front of its table that the next allocation does not give anew."""
        self._held: dict[str, int] = {}
        """Request id -> sequence of the event that held its blocks."""

    def begin(self, projections: Projections) -> None:
        """Take over the saves in flight, and who holds blocks; what a finished request is saved from is held."""
        for job in projections.transfers:
            if job.kind is JobKind.SAVE and job.is_async:
                self._saves[job.job_id] = (0, job.block_ids)
                self._read_by |= dict.fromkeys(job.block_ids, job.job_id)
        for record in projections.tracker:
            if record.state is RequestState.FINISHED and projections.transfers.reads_blocks_of(record.ordinal):
                self._held[record.request_id] = 0

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        model.forgotten.at((*LIFE, e.RequestPreempted, e.RequestFinished), self._num_own)
        model.forgotten.at(LIFE, self._held)
        return [
            (e.StepScheduled, self._step_scheduled),
            (e.BlocksAllocated, self._allocated),
            (e.SaveIssued, self._save_issued),
            (e.SaveCompleted, self._settled),
            (e.SaveFailed, self._settled),
            (e.LookupRequested, self._requested),
            (e.BlocksHeld, self._hold),
        ]

    def _step_scheduled(
        self, event: e.StepScheduled, step: ReplayedEvent, projections: Projections
    ) -> list[Violation] | None:
        return self._check_extended(event, step, projections) if self._read_by and event.extended else None

    def _check_extended(
        self, event: e.StepScheduled, step: ReplayedEvent, projections: Projections
    ) -> list[Violation] | None:
        is_read = self._read_by.keys()
        given = [(ordinal, block_ids) for ordinal, block_ids in event.extended if not is_read.isdisjoint(block_ids)]
        if not given:
            return None
        return [
            found for ordinal, block_ids in given for found in self._check_given(ordinal, block_ids, step, projections)
        ]

    def _allocated(
        self, event: e.BlocksAllocated, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation] | None:
        num_own = self._num_own.get(event.request_id)
        self._num_own[event.request_id] = len(event.block_ids)
        if not self._read_by or step.record is None or num_own is None:
            return None
        return self._check_given(step.record.ordinal, event.block_ids[num_own:], step, projections)

    def _save_issued(self, event: e.SaveIssued, step: ReplayedEvent, _projections: Projections) -> None:
        if event.is_async:
            self._saves[event.job_id] = (step.sequence, event.block_ids)
            read_by, job_id = self._read_by, event.job_id
            for block_id in event.block_ids:  # merging a dict made for it costs twice as much
                read_by[block_id] = job_id

    def _settled(self, event: e.SaveCompleted | e.SaveFailed, _step: ReplayedEvent, _projections: Projections) -> None:
        if self._saves:
            for block_id in self._saves.pop(event.job_id, (0, ()))[1]:
                if self._read_by.get(block_id) == event.job_id:
                    del self._read_by[block_id]

    def _requested(self, event: e.LookupRequested, _step: ReplayedEvent, projections: Projections) -> None:
        num_blocks = event.num_computed_tokens // projections.configuration.block_size
        self._num_own[event.request_id] = num_blocks * len(projections.configuration.windows)

    def _hold(self, event: e.BlocksHeld, step: ReplayedEvent, _projections: Projections) -> None:
        self._held[event.request_id] = step.sequence

    def _check_given(
        self, ordinal: int, block_ids: Iterable[int], step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation]:
        for job_id in sorted({self._read_by[block] for block in block_ids if block in self._read_by}):
            job = projections.transfers.get(job_id)
            record = None if job is None else projections.tracker.of(job.ordinal)
            if job is None or record is None or job.source is SourceRegion.FENCED or job.ordinal == ordinal:
                continue
            ended = record.state is RequestState.FINISHED
            has_them = record.request_id in self._held if ended else record.generation == job.generation
            if has_them and (ended or record.blocks is not BlocksRegion.NONE):
                given = sorted(set(block_ids) & set(job.block_ids) - {NULL_BLOCK})
                whom = projections.tracker.of(ordinal)
                detail = f"blocks {given} are given away, but save {job_id} of {job.request_id!r} still reads them"
                yield violation(
                    self.rule,
                    step,
                    projections,
                    detail,
                    self._saves[job_id][0],
                    request_id="" if whom is None else whom.request_id,
                )
