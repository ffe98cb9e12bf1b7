"""Blocks that are read: which requests have the blocks that a save reads."""

from __future__ import annotations

from collections.abc import Iterable

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.events import NULL_BLOCK
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.records import NEVER, Copy
from kvledger.lifecycle.states import BlocksRegion, RequestState


class SrcBlockStable(Checker):
    """SRC_BLOCK_STABLE: a step changes a block only after each asynchronous save that reads the block has ended.

    Verifies: at every step, one of these holds for each asynchronous save:

    - The save's request is still in the generation for which the save was issued, and has the save's blocks in its
      table.
    - The save's request has finished, and its blocks are held for a copy.
    - A step waits for the save to end.

    Does not verify: saves within a step, which end before the next step begins; blocks that another connector gives
    away; that the workers really wait.
    """

    rule = "SRC_BLOCK_STABLE"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._named: set[int] = set()

    @on(e.StepScheduled)
    def _step_scheduled(self, _event: e.StepScheduled) -> None:
        self._named &= self.copies.async_saves
        for job_id in sorted(self.copies.async_saves):
            job = self.copies.get(job_id)
            if job is None:
                continue
            why = self._why_unstable(job)
            if why and not job.is_fenced and job.job_id not in self._named:
                self._named.add(job.job_id)
                detail = f"save {job.job_id} reads blocks {list(job.block_ids)} asynchronously, but {why}"
                self.broken(detail, request_id=job.request_id)

    def _why_unstable(self, job: Copy) -> str:
        life = self.lives.of(job.ordinal)
        if life is None:
            return "its request is gone"
        if life.state is RequestState.FINISHED:
            return "" if life.held_at != NEVER else "its request has finished and the blocks are not held"
        if not self.copies.is_own(job):
            return "its request has lost them"
        table = self.tables.held_by(life)
        pages = self.layout.pages_of_chunks(job.chunks, len(job.block_ids) + 1)
        is_in_place = len(pages) > 0 and pages[-1] < len(table) and tuple([table[at] for at in pages]) == job.block_ids
        if is_in_place or set(job.block_ids) <= set(table):
            return ""
        return "they are not in the request's table"


class BlockReuseFenced(Checker):
    """BLOCK_REUSE_FENCED: no request is given a block that a copy for another request still reads.

    Verifies: no allocation and no step gives a request a new block that an asynchronous save for another request reads.
    Saves for which a step waits are exempt, and blocks shared from vLLM's prefix cache are not new. The check covers
    blocks that the save's request still has according to the log, and blocks held for the save.
    Does not verify: blocks that the save's request has lost (SRC_BLOCK_STABLE); saves within a step; the order of
    copies and forwards on the device.
    """

    rule = "BLOCK_REUSE_FENCED"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._read_by: dict[int, int] = {}
        """Block id → job id of an asynchronous save."""

    def begin(self) -> None:
        """Read the asynchronous saves in flight from the audit's model."""
        for _, job in self.copies:
            if job.is_async and not job.is_load:
                self._read_by |= dict.fromkeys(job.block_ids, job.job_id)

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        if self._read_by:
            for ordinal, block_ids in event.extended:
                self._check_given(ordinal, block_ids)

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        life = self.moment.life
        if life is not None and life.num_old != NEVER:
            self._check_given(life.ordinal, event.block_ids[life.num_old :])

    @on(e.SaveIssued)
    def _save_issued(self, event: e.SaveIssued) -> None:
        if event.is_async:
            self._read_by |= dict.fromkeys(event.block_ids, event.job_id)

    @on(e.SaveCompleted, e.SaveFailed)
    def _settled(self, event: e.SaveCompleted | e.SaveFailed) -> None:
        if self._read_by and self.copies.current is not None:
            for block_id in self.copies.current.block_ids:
                if self._read_by.get(block_id) == event.job_id:
                    del self._read_by[block_id]

    def _check_given(self, ordinal: int, block_ids: Iterable[int]) -> None:
        for job_id in sorted({self._read_by[block] for block in block_ids if block in self._read_by}):
            job = self.copies.get(job_id)
            life = None if job is None else self.lives.of(job.ordinal)
            if job is None or life is None or job.is_fenced or job.ordinal == ordinal:
                continue
            ended = life.state is RequestState.FINISHED
            has_them = life.held_at != NEVER if ended else life.generation == job.generation
            if has_them and (ended or life.blocks is not BlocksRegion.NONE):
                given = sorted(set(block_ids) & set(job.block_ids) - {NULL_BLOCK})
                receiver = self.lives.of(ordinal)
                detail = (
                    f"blocks {given} went to another request, but save {job_id} of {job.request_id!r} still reads them"
                )
                request_id = "" if receiver is None else receiver.request_id
                self.broken(detail, job.sequence, request_id=request_id)


class DelayFreeContract(Checker):
    """DELAY_FREE_CONTRACT: the blocks of a finished request are held once, and only for a copy that reads them.

    Verifies: blocks are held only when their own request ends. At that time an asynchronous save reads the blocks, and
    no asynchronous load fills them. No request arrives under the id of a request whose blocks are still held.
    Does not verify: whether, and how often, vLLM was asked to hold the blocks (TOLD_AS_DECIDED); when the blocks are
    freed (RELEASE_ALL).
    """

    rule = "DELAY_FREE_CONTRACT"

    @on(e.RequestArrived)
    def _arrived(self, _event: e.RequestArrived) -> None:
        earlier = self.moment.earlier
        if earlier is not None and earlier.held_at != NEVER and self.copies.reads_blocks_of(earlier.ordinal):
            detail = "a request arrives under an id whose blocks are still held, so vLLM would free them twice"
            self.broken(detail, earlier.held_at)

    @on(e.BlocksHeld)
    def _blocks_held(self, event: e.BlocksHeld) -> None:
        life = self.moment.life
        if life is None:
            return  # LEGAL_TRANSITION reports it
        held_before = life.held_at if life.held_at != self.moment.sequence else 0
        if held_before:
            detail = "the request's blocks are held a second time"
        elif event.cause != life.finished_at:
            detail = "the request's blocks are held, but not because the request ended"
        elif not self.copies.reads_blocks_of(life.ordinal):
            detail = "the request's blocks are held, but no copy reads them"
        elif self.copies.is_loading(life.ordinal, life.generation, outside_steps=True):
            detail = "the request's blocks are held for a save, but vLLM keeps them for a load and would get two ends"
        else:
            return
        self.broken(detail, life.finished_at, held_before)
