"""Corrects vLLM's scheduler after a failed load: hashes of unfilled blocks, and requests that read such blocks.

vLLM 0.32 hashes the blocks of a synchronous load into its prefix cache before the load has run. When the load fails,
vLLM removes the hashes only under the policy "fail", only for requests that still run, and not the hashes of blocks
that a sharer computed on top. Under "recompute" vLLM lets sharers go on while one request rewrites the blocks
(`v1/core/sched/scheduler.py`, _handle_invalid_blocks). kvledger corrects both through the block manager that vLLM gives
its connector. Nothing else in kvledger changes state of vLLM's scheduler.
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
    """vLLM's block manager, for blocks that could not be filled."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._manager: KVCacheManager | None = None

    def bind(self, manager: KVCacheManager) -> None:
        """Take the block manager when the scheduler has created it."""
        self._manager = manager

    def is_freed(self, request_id: str) -> bool:
        """Whether vLLM keeps no blocks of the request, by vLLM's id.

        If the request has ended, vLLM has then forgotten it.
        """
        return self._manager is not None and not any(self._manager.get_block_ids(request_id))

    def evict(self, block_ids: AbstractSet[int]) -> None:
        """Let no lookup hit these blocks. Requests keep those that they hold; a block without a hash is unchanged."""
        if self._manager is not None and block_ids:
            self._manager.evict_blocks(set(block_ids))

    def take_back(self, requests: Iterable[Request], block_ids: AbstractSet[int]) -> None:
        """Make every request that holds one of these blocks compute again from its first such block on.

        vLLM does so only for the first holder of each block. Several requests then write the same KV to a shared block,
        and each reads what it wrote itself, in whatever pieces it is scheduled. Under "fail" all holders have ended.
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
