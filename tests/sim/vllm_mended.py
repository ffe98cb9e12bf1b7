"""Mistakes of vLLM 0.32 that have nothing to do with any connector, mended in a world so that they hide nothing else.

Each has its issue. What stands here is as narrow as the mistake: whatever a connector could have caused is not touched.
"""

from __future__ import annotations

from typing import Any


def withdraw_what_is_not_computed(scheduler: Any) -> None:
    """With priorities a request may be preempted in the very pass in which it was scheduled (vllm#57580, #43569).

    Its blocks are hashed as if that step had filled them (`v1/core/sched/scheduler.py`, schedule: the victim of a
    preemption is taken out of `scheduled_running_reqs`), so the next one to ask is given KV that nobody wrote. Here the
    hashes that this pass gave out are taken back from such a victim.
    """
    manager = scheduler.kv_cache_manager
    schedule, preempt = scheduler.schedule, scheduler._preempt_request
    hashed_before: set[tuple[int, Any]] = set()
    is_scheduling = False

    def schedule_and_remember(*arguments: Any, **options: Any) -> Any:
        nonlocal hashed_before, is_scheduling
        hashed_before = {(block.block_id, block.block_hash) for block in manager.block_pool.blocks}
        is_scheduling = True
        try:
            return schedule(*arguments, **options)
        finally:
            is_scheduling = False

    def preempt_and_withdraw(request: Any, *arguments: Any, **options: Any) -> None:
        tables = manager.get_block_ids(request.request_id)
        preempt(request, *arguments, **options)
        if is_scheduling:
            blocks = [manager.block_pool.blocks[block_id] for table in tables for block_id in table]
            hashed = [block for block in blocks if block.block_hash is not None]
            manager.evict_blocks(
                {block.block_id for block in hashed if (block.block_id, block.block_hash) not in hashed_before}
            )

    scheduler.schedule, scheduler._preempt_request = schedule_and_remember, preempt_and_withdraw
