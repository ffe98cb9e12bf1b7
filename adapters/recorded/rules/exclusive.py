"""Blocks of copies in flight. If the log does not show when a copy ends, the copy counts as ended at once."""

from __future__ import annotations

from kvledger.adapters.recorded.payloads import STEP
from kvledger.adapters.recorded.rules.under_way import Begun, RuleOfCopies
from kvledger.lifecycle.events import NULL_BLOCK


class LoadDstExclusive(RuleOfCopies):
    """LOAD_DST_EXCLUSIVE: a load fills only blocks that vLLM allocated for it, and nothing else fills these blocks.

    In the request's table, the blocks for the claimed tokens follow the blocks of the computed tokens
    (`kv_connector/v1/base.py`, get_num_new_matched_tokens and update_state_after_alloc, 0.32). The blocks of computed
    tokens may be shared with running requests.

    Verifies: each block of a load is in the request's block table, at the place of tokens that must be loaded. The load
    names each block once. No other load in flight fills the block, and no other request gets the block before the load
    has ended.
    Does not verify: copies of a connector without a decoder; whether a step in flight writes into a block that a
    request has lost, which depends on the order of the device's streams.
    """

    rule = "LOAD_DST_EXCLUSIVE"
    judges_loads = True

    def begins(self, begun: Begun) -> None:
        """Check that vLLM allocated the blocks for this load, and that no other load fills them."""
        copy, table = begun.copy, self.tables.of(begun.ordinal)
        jobs = [job for job in self.copies.of_life(begun.ordinal) if job.is_load]
        given = {block_id for job in jobs for block_id in job.block_ids}
        foreign = next((block_id for block_id in copy.block_ids if block_id not in given | {NULL_BLOCK}), None)
        if foreign is not None:
            if not jobs:
                why = "for which vLLM has claimed no tokens"
            elif foreign not in table:
                why = "which does not belong to the request"
            else:
                load = min(table.index(block_id) for block_id in given if block_id in table)
                is_before = table.index(foreign) < load
                why = "whose tokens vLLM counts as computed" if is_before else "which vLLM did not allocate for it"
            self.broken(f"load {copy.job} fills block {foreign}, {why}", request_id=begun.request_id)
        if len(copy.block_ids) - copy.block_ids.count(NULL_BLOCK) > len(begun.block_ids):
            self.broken(f"load {copy.job} fills a block twice: {list(copy.block_ids)}", request_id=begun.request_id)
        for other in self.under_way(loads=True):
            if shared := begun.block_ids & other.block_ids:
                detail = f"load {copy.job} fills block {min(shared)}, which load {other.copy.job} is still filling"
                self.broken(detail, other.sequence, request_id=begun.request_id)

    def step_built(self) -> None:
        """Check that no block of a load was given to another request."""
        self.given_away(loads=True)


class BlockReuseFenced(RuleOfCopies):
    """BLOCK_REUSE_FENCED: no request gets a block that a save for another request still reads.

    vLLM has two ways to ensure this. "Async saves must retain their source blocks until completion is reported to the
    scheduler" (wait_for_save). Otherwise, the workers finish the saves before the step that fills the blocks
    (handle_preemptions; `kv_connector/v1/base.py`, 0.32).

    Verifies: at each step, all blocks that requests got in the step, or in allocations since the previous step. No save
    for another request still reads one of these blocks. Shared blocks are not checked.
    Does not verify: copies of a connector without a decoder; copies whose end is not in the log; that workers wait if
    the metadata tells them to.
    """

    rule = "BLOCK_REUSE_FENCED"
    judges_loads = False

    def step_built(self) -> None:
        """Check that no block of a save was given to another request."""
        self.given_away(loads=False)


class SrcBlockStable(RuleOfCopies):
    """SRC_BLOCK_STABLE: no load fills a block that a save still reads.

    Verifies: when a load begins, no save in flight reads one of its blocks, whatever the save's request.
    Does not verify: copies of a connector without a decoder; copies whose end is not in the log; writes of a forward
    pass into the block. BLOCK_REUSE_FENCED finds the writes of another request. The request itself writes only to
    positions after the saved tokens, which does no harm.
    """

    rule = "SRC_BLOCK_STABLE"
    judges_loads = True

    def begins(self, begun: Begun) -> None:
        """Check that no save reads the load's blocks."""
        for save in self.under_way(loads=False):
            if shared := begun.block_ids & save.block_ids:
                detail = f"load {begun.copy.job} fills block {min(shared)}, which save {save.copy.job} still reads"
                self.broken(detail, save.sequence, request_id=begun.request_id)


class LoadXorStores(RuleOfCopies):
    """LOAD_XOR_STORES: a block is not saved while a load fills it, because the save might copy the block's old content.

    Verifies: for each save that begins, that no asynchronous load in flight fills one of the save's blocks.
    Does not verify: loads within a step, because they end before the step computes the tokens that its saves read;
    copies of a connector without a decoder; copies whose end is not in the log.
    """

    rule = "LOAD_XOR_STORES"
    judges_loads = False

    def begins(self, begun: Begun) -> None:
        """Check that no load fills the save's blocks."""
        for load in self.under_way(loads=True):
            if load.copy.ends_with != STEP and (shared := begun.block_ids & load.block_ids):
                detail = f"save {begun.copy.job} reads block {min(shared)}, which load {load.copy.job} is still filling"
                self.broken(detail, load.sequence, request_id=begun.request_id)
