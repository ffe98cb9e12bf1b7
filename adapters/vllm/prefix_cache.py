"""Corrects vLLM's scheduler after a failed load: removes unfilled blocks from the prefix cache, rolls requests back.

vLLM 0.32 puts the blocks of a synchronous load into its prefix cache before the load has run. If the load fails, vLLM
removes them only under the policy "fail", and only for requests that still run. It does not remove later blocks that
another request has computed from them. Under "recompute", one request writes the unfilled blocks again, and vLLM lets
other requests with the same blocks go on meanwhile (`v1/core/sched/scheduler.py`, _handle_invalid_blocks). kvledger
corrects both faults through the block manager that vLLM gives its connector. Nothing else in kvledger changes the state
of vLLM's scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from kvledger.adapters.vllm.log_ids import vllm_id

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class PrefixCache:
    """Removes unfilled blocks from vLLM's prefix cache, and rolls requests back. Uses vLLM's block manager."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._manager: KVCacheManager | None = None

    def bind(self, manager: KVCacheManager) -> None:
        """Keep the block manager. Called when the scheduler has created it."""
        self._manager = manager

    def is_freed(self, request_id: str) -> bool:
        """Whether vLLM keeps no blocks of the request. `request_id` is vLLM's id.

        If this is true of a finished request, vLLM has forgotten the request.
        """
        return self._manager is not None and not any(self._manager.get_block_ids(request_id))

    def evict(self, block_ids: AbstractSet[int]) -> None:
        """Remove these blocks from vLLM's prefix cache, so that no lookup finds them.

        Requests keep the blocks that they hold. Blocks that are not in the prefix cache are unchanged.
        """
        if self._manager is not None and block_ids:
            self._manager.evict_blocks(set(block_ids))

    def take_back(self, requests: Iterable[Request], block_ids: AbstractSet[int]) -> None:
        """Make every request that holds one of these blocks compute again from its first such block on.

        vLLM does so only for the first request that holds a block. If several requests share a block, all of them now
        write the same KV to it. Each request then reads only KV that it has written itself, whatever the other requests
        do. Under the policy "fail", all requests that held such a block have ended.
        """
        if self._manager is None:
            return
        for request in requests:
            tables = self._manager.get_block_ids(vllm_id(request))
            if len(tables) != 1:  # vLLM reports failures by request there, never by block
                return
            for place, block_id in enumerate(tables[0]):
                if block_id in block_ids:
                    request.num_computed_tokens = min(request.num_computed_tokens, place * self._block_size)
                    break
