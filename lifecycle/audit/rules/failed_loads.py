"""Failed loads: tokens and blocks on which no request may rely after a load has failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.records import NEVER, Copy
from kvledger.lifecycle.states import BlocksRegion


@attrs.define
class _Load:
    sequence: int
    request_id: str
    end_token: int
    block_ids: tuple[int, ...]
    failed_at: int = 0
    reported_late_at: int = 0
    """Sequence number of the load's failure if the load was not handed out; otherwise 0. vLLM learns of such a failure
    only when blocks of the load are reported as not filled. Before that, vLLM may schedule the request."""


class RollbackObserved(Checker):
    """ROLLBACK_OBSERVED: after a failed load, no request counts tokens as computed that were not loaded.

    Verifies: at the first step after a failure:

    - If a load within a step failed, the load's request continues in the next step from a token before the load's end.
      If the load was not handed out, vLLM learns of the failure later, and the first step after that is checked. A
      request is exempt if it was rolled back to a token before the load's end, preempted, looked up again or ended
      after the load was issued.
    - If vLLM was told that a block is not filled, each request that still has this block counts only tokens before the
      block as computed. This is checked at the first step that schedules the request, if the model has only one group
      of layers.

    Does not verify: asynchronous loads, because their requests have not begun to compute; loads that were given up
    because a rank did not report them; that vLLM learns of a load that was not handed out.
    """

    rule = "ROLLBACK_OBSERVED"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._loads: dict[int, _Load] = {}
        self._holders: dict[str, tuple[int, int, int]] = {}
        """Request id → (ordinal, first token of the request's first unfilled block, sequence number of the event that
        reports the block)."""

    @on(e.LoadIssued)
    def _issued(self, event: e.LoadIssued) -> None:
        if not event.is_async:
            end_token = event.first_token + event.num_tokens
            self._loads[event.job_id] = _Load(self.moment.sequence, event.request_id, end_token, event.block_ids)

    @on(e.LoadCompleted)
    def _completed(self, event: e.LoadCompleted) -> None:
        self._loads.pop(event.job_id, None)

    @on(e.LoadFailed)
    def _failed(self, event: e.LoadFailed) -> None:
        if event.cause != self.copies.failure_sequence:
            self._loads.pop(event.job_id, None)
        elif event.job_id in self._loads and self.copies.is_withheld:
            self._loads[event.job_id].reported_late_at = self.moment.sequence
        elif event.job_id in self._loads:
            self._loads[event.job_id].failed_at = self.moment.sequence

    @on(e.LoadErrorsObserved)
    def _load_errors_observed(self, event: e.LoadErrorsObserved) -> None:
        for load in self._loads.values():
            if load.reported_late_at and not set(event.block_ids).isdisjoint(load.block_ids):
                load.failed_at = load.reported_late_at
        if self.layout.num_groups > 1:  # with several groups, vLLM accepts no blocks, only requests
            return
        failed = set(event.block_ids)
        for life in self.lives:
            table = () if life.quarantined or life.blocks is BlocksRegion.NONE else self.tables.of(life.ordinal)
            page = next((page for page, block_id in enumerate(table) if block_id in failed), None)
            if page is not None:
                first_token = page * self.layout.block_size
                self._holders[life.request_id] = life.ordinal, first_token, self.moment.sequence

    @on(e.BlockTableObserved)
    def _table_observed(self, event: e.BlockTableObserved) -> None:
        self._holders.pop(event.request_id, None)

    @on(e.TokensRolledBack)
    def _rolled_back(self, event: e.TokensRolledBack) -> None:
        self._forget(event.request_id, event.num_computed_tokens)

    @on(e.RequestPreempted, e.RequestFinished, e.LookupRequested, e.RequestArrived, e.RequestReleased)
    def _given_up(self, event: e.RequestEvent) -> None:
        self._forget(event.request_id, 0)

    def _forget(self, request_id: str, num_computed_tokens: int) -> None:
        for job_id in [
            job_id
            for job_id, load in self._loads.items()
            if load.request_id == request_id and num_computed_tokens < load.end_token
        ]:
            del self._loads[job_id]
        if request_id in self._holders and num_computed_tokens <= self._holders[request_id][1]:
            del self._holders[request_id]

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        if not self._loads and not self._holders:
            return
        known = {ordinal: num_computed_tokens for ordinal, num_computed_tokens, _, _ in event.advanced}
        for job_id, load in [(job_id, load) for job_id, load in self._loads.items() if load.failed_at]:
            del self._loads[job_id]
            life = self.lives.get(load.request_id)
            if life is None or life.blocks is BlocksRegion.NONE:
                continue
            # Rejected drafts have no event, so the step's own count is used.
            num_computed_tokens = known.get(life.ordinal, self.lives.num_computed_tokens(life))
            if num_computed_tokens >= load.end_token:
                detail = (
                    f"load {job_id} up to token {load.end_token} failed, "
                    f"but the request goes on with {num_computed_tokens} tokens computed"
                )
                self.broken(detail, load.sequence, load.failed_at, request_id=load.request_id)
        for request_id, (ordinal, first_token, sequence) in tuple(self._holders.items()):
            life = self.lives.of(ordinal)
            if life is not None and ordinal not in known and life.decoding_since == NEVER:
                continue  # the step does not schedule it
            del self._holders[request_id]
            if life is None or life.blocks is BlocksRegion.NONE:
                continue
            num_computed_tokens = known.get(ordinal, self.lives.num_computed_before_step(life))
            if num_computed_tokens > first_token:
                detail = (
                    f"the request's block that begins at token {first_token} is not filled, "
                    f"but the request goes on with {num_computed_tokens} tokens computed"
                )
                self.broken(detail, sequence, request_id=request_id)


class FailedLoadTaint(Checker):
    """FAILED_LOAD_TAINT: chunks of a failed load are not offered again, and its blocks do not count as computed.

    Verifies: after a failed load:

    - At the first step, lookup or report after a load has failed, no chunk of the load is committed any more.
    - No load is issued for a request with `max_failed_loads` failed loads.
    - A block that a failed load left unfilled is neither given to a request as computed nor saved, until the block is
      written or loaded again.
    - A save that relies on a failed load is not committed, whether the save is for the load's own request or for
      another request that has blocks of the load.

    Does not verify: loads from tainted chunks (LOADABLE_AFTER_COMMIT); tails, which are dropped when their load fails;
    blocks that a failure before the audit's start left unfilled. Another request may have computed further blocks from
    an unfilled block. If these are given to a request, or saved, after the failure is known, this is not verified.
    """

    rule = "FAILED_LOAD_TAINT"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._failures: list[tuple[int, Copy]] = []
        """(sequence number, load) of each failure since the last observation."""
        self._unfilled: dict[int, int] = {}
        """Block id → sequence number of the failure that left the block unfilled."""
        self._num_local_tokens: dict[str, int] = {}
        """Request id → tokens that its last lookup found in vLLM's prefix cache; recorded only while a block is
        unfilled."""
        self._hits: list[tuple[str, int, Sequence[int]]] = []
        """(request id, sequence number of the allocation, blocks that the request got as computed), until the next
        step."""
        self._spoilt: dict[int, int] = {}
        """Job id of a save in flight → sequence number of a load's failure. The save's blocks rely on this load."""
        self._relied_on: dict[int, tuple[Sequence[int], int]] = {}
        """Job id of a save in flight → (block table of the request when the save was issued, number of pages in the
        table up to the save's end)."""

    @on(e.StepScheduled, e.LookupRequested, e.TransferReported)
    def _observed(self, _event: e.Event) -> None:
        for sequence, load in self._failures:
            if any(key in self.chunks for key in load.keys):
                detail = "the load of the request failed, but chunks of that load can still be looked up"
                self.broken(detail, sequence, request_id=load.request_id)
        self._failures.clear()

    @on(e.LoadIssued)
    def _issued(self, event: e.LoadIssued) -> None:
        self._fill(event.block_ids)
        life, maximum = self.moment.life, self.configuration.max_failed_loads
        if life is not None and life.num_failed_loads >= maximum:
            detail = f"load {event.job_id} is issued after {life.num_failed_loads} failed loads; the limit is {maximum}"
            self.broken(detail, event.cause)

    @on(e.LoadFailed)
    def _failed(self, event: e.LoadFailed) -> None:
        load = self.copies.current
        if load is None:
            return
        self._failures.append((self.moment.sequence, load))
        for job_id, save in self.copies:  # the request id may be in use again
            if save.life == load.life and not save.is_load and job_id > event.job_id:
                self._spoilt[job_id] = self.moment.sequence

    # --- blocks ------------------------------------------------------------------------------

    @on(e.LoadErrorsObserved)
    def _load_errors_observed(self, event: e.LoadErrorsObserved) -> None:
        self._unfilled.update(dict.fromkeys(event.block_ids, self.moment.sequence))
        loads = [job for _, job in self.copies if job.is_load and not job.is_async]
        for job_id, save in self.copies:
            if save.is_load:
                continue
            table, end = self._relied_on.get(job_id, ((), 0))
            concerned = set(save.block_ids).union(
                *[set(load.block_ids).intersection(table[:end]) for load in loads if load.sequence < save.sequence]
            )
            if not self._unfilled.keys().isdisjoint(concerned):
                self._spoilt[job_id] = self.moment.sequence

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        if not self._unfilled:
            self._hits.clear()  # of blocks that have been filled since
            return
        for ordinal, num_computed_tokens, num_scheduled_tokens, _ in event.advanced:
            table = self.tables.of(ordinal)
            # Blocks whose first token is computed in this step.
            first = self.layout.pages_of(range(num_computed_tokens)).stop
            end = self.layout.pages_of(range(num_computed_tokens + num_scheduled_tokens)).stop
            self._fill(table[first:end])
        for _, block_ids in event.extended:
            self._fill(block_ids)
        for request_id, sequence, given in self._hits:
            unfilled = [block_id for block_id in given if block_id in self._unfilled]
            if unfilled:
                detail = f"the request got blocks {unfilled} as computed, but they were not written since a load failed"
                self.broken(detail, sequence, self._unfilled[unfilled[0]], request_id=request_id)
        self._hits.clear()

    def _fill(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._unfilled.pop(block_id, None)

    @on(e.LookupRequested)
    def _lookup_requested(self, event: e.LookupRequested) -> None:
        if self._unfilled:
            self._num_local_tokens[event.request_id] = event.num_computed_tokens

    @on(e.BlocksAllocated)
    def _blocks_allocated(self, event: e.BlocksAllocated) -> None:
        num_tokens = self._num_local_tokens.pop(event.request_id, None)
        if num_tokens is not None:  # check it after the step, which may write the blocks that it hits
            num_hit = self.layout.pages_of(range(num_tokens)).stop
            self._hits.append((event.request_id, self.moment.sequence, event.block_ids[:num_hit]))
            self._fill(event.block_ids[num_hit:])  # new blocks; another connector may fill them without an event

    @on(e.SaveIssued, e.TailSaveIssued)
    def _save_issued(self, event: e.SaveIssued | e.TailSaveIssued) -> None:
        unfilled = [block_id for block_id in event.block_ids if block_id in self._unfilled]
        if unfilled:
            detail = f"save {event.job_id} reads blocks {unfilled}, which have not been written since a load failed"
            self.broken(detail, self._unfilled[unfilled[0]], event.cause)
        if isinstance(event, e.TailSaveIssued):
            num_tokens = event.first_token + event.num_tokens
        else:
            num_tokens = (max(event.chunks, default=-1) + 1) * self.layout.chunk_size
        table = self.tables.of(event.ordinal) or self.tables.lost_by(self.moment.life)
        self._relied_on[event.job_id] = table, self.layout.pages_of(range(num_tokens)).stop

    @on(e.SaveCompleted)
    def _save_completed(self, event: e.SaveCompleted) -> None:
        self._relied_on.pop(event.job_id, None)
        failed_at = self._spoilt.pop(event.job_id, None)
        if failed_at is not None:
            self.broken(f"save {event.job_id} is committed, but its blocks rely on a load that failed", failed_at)

    @on(e.SaveFailed)
    def _save_failed(self, event: e.SaveFailed) -> None:
        self._relied_on.pop(event.job_id, None)
        self._spoilt.pop(event.job_id, None)
