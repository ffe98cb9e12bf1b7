"""Blocks that are filled: which requests use the blocks that a load fills."""

from __future__ import annotations

from collections.abc import Iterable

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.records import NEVER, Life


class LoadDstExclusive(Checker):
    """LOAD_DST_EXCLUSIVE: while a load fills a block, no other load fills it, and no other request has it.

    Verifies: of every load:

    - A load fills the blocks that its tokens have in the request's table, each block once.
    - No block is filled by two loads in flight. Loads whose request has lost its blocks are exempt.
    - When a load is issued, no other request has one of the load's blocks in its table. No other request gets one of
      these blocks before the load ends.
    - While an asynchronous load is in flight, no step computes tokens of its request.

    Does not verify: tables of quarantined requests; tables of requests whose load has failed, and tables of groups
    with a window, because vLLM frees these blocks without a hook; that no forward in flight writes a block. If a
    request is preempted before its load is reported, another load may fill the same blocks for another request. Then
    the result depends on the order of the two loads on the device, which the scheduler's log does not show.
    """

    rule = "LOAD_DST_EXCLUSIVE"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._named: set[int] = set()
        """Loads in flight that were reported because their request computed tokens, so that each is reported once."""

    @on(e.BlocksAllocated)
    def _check_given(self, event: e.BlocksAllocated) -> None:
        life = self.moment.life
        if life is not None and self.copies.filled_by:
            # The first blocks are from the prefix cache, so a load within the step may still fill them. Their number is
            # not known if the audit began between the lookup and the allocation.
            num_shared = len(event.block_ids) if life.num_old == NEVER else life.num_old
            self._check_filling(life, event.block_ids[num_shared:])
            self._check_filling(life, event.block_ids[:num_shared], is_shared=True)

    def _check_filling(self, life: Life, block_ids: Iterable[int], *, is_shared: bool = False) -> None:
        """Report blocks that this life gets while a load fills them for another request, which still has the blocks."""
        filled_by = self.copies.filled_by
        given: dict[int, int] = {}
        for block_id in block_ids:
            if block_id in filled_by:
                given.setdefault(filled_by[block_id], block_id)
        for job_id, block_id in given.items() if not life.quarantined else ():
            job = self.copies.get(job_id)
            if job is None or job.ordinal == life.ordinal or job.lost_at or (is_shared and not job.is_async):
                continue
            holder = self.lives.of(job.ordinal)
            if holder is not None and holder.generation == job.generation and not holder.quarantined:
                detail = (
                    f"the request gets block {block_id}, which load {job_id} of {holder.request_id!r} is still filling"
                )
                self.broken(detail, job.sequence, request_id=life.request_id)

    @on(e.StepScheduled)
    def _check_step(self, event: e.StepScheduled) -> None:
        if not self.copies.loads:
            return
        for ordinal, block_ids in event.extended:
            extended = self.lives.of(ordinal)
            if extended is not None:
                self._check_filling(extended, block_ids)
        self._named &= self.copies.loads
        for ordinal, _, num_scheduled_tokens, _ in event.advanced:
            life = self.lives.of(ordinal) if self.copies.owes(ordinal) else None
            if life is None:
                continue
            for job in self.copies.of_life(ordinal):
                is_filling = job.is_load and job.is_async and not job.lost_at and job.generation == life.generation
                if is_filling and job.job_id not in self._named:
                    self._named.add(job.job_id)
                    detail = f"{num_scheduled_tokens} tokens are computed while load {job.job_id} fills their blocks"
                    self.broken(detail, job.sequence, request_id=life.request_id)

    @on(e.LoadIssued)
    def _check_load(self, event: e.LoadIssued) -> None:
        table = self.tables.held_by(self.moment.life)
        pages = self.layout.pages_of(range(event.first_token, event.first_token + event.num_tokens))
        expected = tuple(table[max(pages.start, 0) : max(pages.stop, 0)])
        if event.block_ids != expected or len(expected) != len(pages):
            detail = (
                f"load {event.job_id} fills blocks {list(event.block_ids)}, "
                f"but its tokens ({len(pages)} pages) are in blocks {list(expected)} of the request's table"
            )
            self.broken(detail, event.cause)
        filled = [] if self.copies.current is None else self.copies.current.filled
        if len(set(filled)) < len(filled):
            detail = f"load {event.job_id} fills a block twice: {list(event.block_ids)}"
            self.broken(detail, event.cause)
        for job_id in sorted(self.copies.rivals):
            rival = self.copies.get(job_id)
            if rival is not None and not rival.lost_at:
                detail = f"load {event.job_id} fills blocks that load {job_id} is still filling"
                self.broken(detail, rival.sequence, event.cause)
        for life, block in self.tables.other_holders(event.ordinal, filled):
            detail = f"load {event.job_id} fills block {block}, which {life.request_id!r} holds"
            self.broken(detail, event.cause)


class LoadXorStores(Checker):
    """LOAD_XOR_STORES: a block is not saved while a load fills it.

    If a save reads a block while a load fills it, the save might copy the block's old content.

    Verifies: when a save is issued, it reads no block that one of these is filling: a load of the same request, or an
    asynchronous load of any request. Loads whose request has just lost its blocks are checked, too. A save before its
    step's forward may read the blocks of loads that begin in the same step, because the save precedes these loads. A
    save that is decided after a step may read the blocks of loads within that step, because the save follows these
    loads.
    Does not verify: blocks that a load within a step fills for another request; loads that begin while a save is in
    flight.
    """

    rule = "LOAD_XOR_STORES"

    @on(e.SaveIssued, e.TailSaveIssued)
    def _check_save(self, event: e.SaveIssued | e.TailSaveIssued) -> None:
        if not self.copies.filled_by:
            return
        is_first = isinstance(event, e.TailSaveIssued) or event.before_forward
        # A step hands out what is decided on it, and what was decided since the step before.
        last_step, step_before = self.lives.last_steps
        begin_of_step = step_before if event.cause == last_step else last_step
        filled_by = self.copies.filled_by
        for job_id in sorted({filled_by[block] for block in event.block_ids if block in filled_by}):
            load = self.copies.get(job_id)
            if load is None or 0 < load.lost_at < last_step:
                continue  # its blocks can be read only until the step after they were lost
            if is_first and load.sequence > begin_of_step:
                continue
            if not load.is_async and load.sequence < last_step < event.cause:
                continue  # decided after the step that had the load
            if load.is_async or load.request_id == event.request_id:
                detail = f"save {event.job_id} reads blocks that load {job_id} is still filling"
                self.broken(detail, load.sequence, event.cause)


class NewBlockExclusive(Checker):
    """NEW_BLOCK_EXCLUSIVE: a request gets no new block that another running request has in its table.

    Requests share only the blocks of vLLM's prefix cache. A table begins with these shared blocks. They contain the
    tokens that the request's lookup counted as computed. The blocks after them are new, and only the request with this
    table fills them.

    Verifies: at the first step after an allocation, and at each step that extends a table, no other request with
    computed tokens has one of the new blocks. The other request may have got the block earlier or in the same step.
    Does not verify: groups with a window and requests whose load has failed, because vLLM frees their blocks without a
    hook; blocks that a load fills (LOAD_DST_EXCLUSIVE); quarantined requests. If the audit begins in the middle of a
    log, allocations before that point are not verified, and neither are blocks of the prefix cache until the next step.
    """

    rule = "NEW_BLOCK_EXCLUSIVE"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._allocated: set[int] = set()
        """Ordinals of lives with an allocation since the last step."""
        self._suspects: list[tuple[int, int, int, int]] = []
        """(sequence number of an allocation since the last step, ordinal, new block, ordinal of another life that had
        the block)."""

    def begin(self) -> None:
        """Assume that each life was given blocks since the last step."""
        self._allocated.update(life.ordinal for life in self.lives)

    @on(e.BlocksAllocated)
    def _given(self, event: e.BlocksAllocated) -> None:
        life = self.moment.life
        if life is None or life.quarantined:
            return
        self._allocated.add(life.ordinal)
        if life.num_old != NEVER:
            for other, block_id in self.tables.other_holders(life.ordinal, event.block_ids[life.num_old :]):
                self._suspects.append((self.moment.sequence, life.ordinal, block_id, other.ordinal))

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        for sequence, ordinal, block_id, other in self._suspects:
            if block_id in self.tables.of(other):  # not preempted since
                self._check(ordinal, block_id, other, sequence)
        for ordinal, block_ids in event.extended:
            for holder, block_id in self.tables.other_holders(ordinal, block_ids):
                if not self._shares(holder, block_id):
                    self._check(ordinal, block_id, holder.ordinal)
        self._allocated.clear()
        self._suspects.clear()

    def _shares(self, holder: Life, block_id: int) -> bool:
        """Whether the holder got, or may have got, the block from vLLM's prefix cache since the last step."""
        if holder.num_old == NEVER:  # its lookup came before the audit began
            return True
        return holder.ordinal in self._allocated and block_id in self.tables.of(holder.ordinal)[: holder.num_old]

    def _check(self, ordinal: int, block_id: int, other: int, *evidence: int) -> None:
        life, holder = self.lives.of(ordinal), self.lives.of(other)
        if life is None or holder is None or life.quarantined:
            return
        if self.lives.num_computed_tokens(life) > 0 and self.lives.num_computed_tokens(holder) > 0:
            detail = (
                f"the request gets block {block_id} as a new one, but the running request {holder.request_id!r} has it"
            )
            self.broken(detail, *evidence, request_id=life.request_id)
