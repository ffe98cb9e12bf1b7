"""Blocks that are filled: who uses them while a load does so."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.jobs import InFlight
from kvledger.lifecycle.audit.model.moment import on
from kvledger.lifecycle.audit.model.start import Start
from kvledger.lifecycle.windows import NO_SLOT


class LoadDstExclusive(Checker):
    """LOAD_DST_EXCLUSIVE: nobody else fills the blocks that a load fills.

    A block is the destination of at most one load in flight, and held by that load's request.

    Verifies: a load's blocks are those of its tokens in the request's table, each once, and no load in flight of a
    request that still holds its blocks fills one of them.
    Does not verify: that no other request's table holds the block, and that no forward in flight writes it. A
    request can be preempted before its load is reported, and its blocks be filled for another one: then the
    order of the copies on the device decides, which no log of the scheduler shows.
    """

    rule = "LOAD_DST_EXCLUSIVE"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._filled_by: dict[int, tuple[int, int]] = {}
        """Block id -> (job id, sequence of the load)."""
        self._blocks_of: dict[int, tuple[int, ...]] = {}

    def begin(self, start: Start) -> None:
        """Take over the loads in flight of requests that still hold their blocks."""
        for job in start.jobs:
            if job.is_load and self.jobs.is_own(job):
                self._fill(job, 0)

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued) -> None:
        self._check_load(event)
        self._fill(event, self.moment.sequence)

    def _fill(self, load: e.LoadIssued | InFlight, sequence: int) -> None:
        self._blocks_of[load.job_id] = filled = _filled_blocks(load)
        self._filled_by |= dict.fromkeys(filled, (load.job_id, sequence))

    @on(e.RequestPreempted, e.RequestFinished)
    def _blocks_taken(self, event: e.RequestPreempted | e.RequestFinished) -> None:
        if self._blocks_of:
            for job_id, job in self.jobs:
                if job.request_id == event.request_id:
                    self._let_go(job_id)

    @on(e.LoadCompleted, e.LoadFailed)
    def _settled(self, event: e.LoadCompleted | e.LoadFailed) -> None:
        self._let_go(event.job_id)

    def _let_go(self, job_id: int) -> None:
        for block_id in self._blocks_of.pop(job_id, ()):
            if self._filled_by.get(block_id, (0, 0))[0] == job_id:
                del self._filled_by[block_id]

    def _check_load(self, event: e.LoadIssued) -> None:
        table = self.tables.held_by(self.moment.life)
        pages = self.geometry.pages_spanning(event.first_token, event.num_tokens)
        expected = tuple(table[pages.start : pages.stop])
        if event.block_ids != expected:
            detail = (
                f"load {event.job_id} fills blocks {list(event.block_ids)}, "
                f"in the request's table its tokens have {list(expected)}"
            )
            self.broken(detail, event.cause)
        filled = _filled_blocks(event)
        if len(set(filled)) < len(filled):
            detail = f"load {event.job_id} fills a block twice: {list(event.block_ids)}"
            self.broken(detail, event.cause)
        rivals = {self._filled_by[block_id] for block_id in filled if block_id in self._filled_by}
        for job_id, sequence in sorted(rivals):
            detail = f"load {event.job_id} fills blocks that load {job_id} is still filling"
            self.broken(detail, sequence, event.cause)


def _filled_blocks(load: e.LoadIssued | InFlight) -> tuple[int, ...]:
    """Without those that stand in the table for what a window does not see."""
    return tuple(block_id for slot, block_id in zip(load.slots, load.block_ids, strict=False) if slot != NO_SLOT)


class LoadXorStores(Checker):
    """LOAD_XOR_STORES: a block is not saved while a load fills it.

    No save reads a block that a load in flight is to fill: what it copies may be what was there before.

    Verifies: this for the blocks of every save against the loads in flight of the same request, and against
    asynchronous loads of any; also for blocks just lost. A save that precedes its step's forward also precedes
    the loads that begin in that step, and what is decided between two steps follows the loads within the first.
    Does not verify: other requests that share a block loaded within a step; that a request has no save in flight when
    a load begins, which does no harm where their blocks differ.
    """

    rule = "LOAD_XOR_STORES"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._filled_by: dict[int, int] = {}
        """Block id -> job id of a load in flight."""
        self._loads: dict[int, tuple[int, e.LoadIssued | InFlight]] = {}
        self._last_step = self._step_before = 0
        self._leaving: list[int] = []
        """Loads into blocks that their request has lost since the last step; until then they can still be read."""

    def begin(self, start: Start) -> None:
        """Take over the loads in flight of requests that still hold their blocks."""
        for job in start.jobs:
            if job.is_load and self.jobs.is_own(job):
                # Issued before the last step, or since; that step stands before the first event of the audit, as 0.
                self._take_up(-1 if job.since_step < start.num_steps else 0, job)

    @on(e.LoadIssued)
    def _issued(self, event: e.LoadIssued) -> None:
        self._take_up(self.moment.sequence, event)

    def _take_up(self, sequence: int, load: e.LoadIssued | InFlight) -> None:
        self._loads[load.job_id] = (sequence, load)
        for slot, block_id in zip(load.slots, load.block_ids, strict=False):
            if slot != NO_SLOT:
                self._filled_by[block_id] = load.job_id

    @on(e.LoadCompleted, e.LoadFailed)
    def _settled(self, event: e.LoadCompleted | e.LoadFailed) -> None:
        self._let_go(event.job_id)

    @on(e.SaveIssued, e.TailSaveIssued)
    def _saved(self, event: e.SaveIssued | e.TailSaveIssued) -> None:
        if self._filled_by:
            self._check_save(event)

    @on(e.RequestPreempted, e.RequestFinished)
    def _stopped(self, event: e.RequestPreempted | e.RequestFinished) -> None:
        if self._loads:
            self._leaving += [
                job_id for job_id, (_, load) in self._loads.items() if load.request_id == event.request_id
            ]

    @on(e.StepScheduled)
    def _step_scheduled(self, _event: e.StepScheduled) -> None:
        self._step_before, self._last_step = self._last_step, self.moment.sequence
        if self._leaving:
            leaving, self._leaving = self._leaving, []
            for job_id in leaving:
                self._let_go(job_id)

    def _let_go(self, job_id: int) -> None:
        _, load = self._loads.pop(job_id, (0, None))
        for block_id in () if load is None else load.block_ids:
            if self._filled_by.get(block_id) == job_id:
                del self._filled_by[block_id]

    def _check_save(self, event: e.SaveIssued | e.TailSaveIssued) -> None:
        is_first = isinstance(event, e.TailSaveIssued) or event.before_forward
        # What is decided on a step goes out with it, and so does what was decided since the step before.
        begin_of_step = self._step_before if event.cause == self._last_step else self._last_step
        for job_id in sorted({self._filled_by[block] for block in event.block_ids if block in self._filled_by}):
            sequence, load = self._loads[job_id]
            if is_first and sequence > begin_of_step:
                continue
            if not load.is_async and sequence < self._last_step < event.cause:
                continue  # between two steps, of which the first one had the load in it
            if load.is_async or load.request_id == event.request_id:
                detail = f"save {event.job_id} reads blocks that load {job_id} is still filling"
                self.broken(detail, max(0, sequence), event.cause)
