"""Looks into vLLM's prefix cache after every step: what a block is hashed as must be what it holds.

A block that is hashed and wrong is found here before anybody hits it. Excused are blocks of which the scheduler cannot
know yet that they are wrong, because the step in which their load failed is still in flight.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

if TYPE_CHECKING:
    from kvledger.adapters.lab.simulation.engine import SimulatedEngine
    from sim.world import Life


class PoisonedCache(AssertionError):
    """VLLM's prefix cache offers a block that holds other KV than its hash stands for."""


class CachedBlocks:
    """Knows for every block hash of every request what KV belongs to it."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._expected: dict[bytes, np.ndarray] = {}
        self.num_blocks_checked = 0

    def forget(self) -> None:
        """With new weights all that was known is wrong; the cache must be empty."""
        self._expected.clear()

    def look(self, lives: Iterable[Life]) -> None:
        """Take up the hashes that became known and compare every cached block.

        Raises:
            PoisonedCache: naming the block.
        """
        model, block_size = self._engine.model, self._engine.model.block_size
        for life in lives:
            hashes = life.request.block_hashes
            for index in range(life.num_known_blocks, len(hashes)):
                kv = life.truth.hashes(index * block_size, (index + 1) * block_size)
                self._expected[hashes[index]] = np.array(kv, dtype=np.int64)
            life.num_known_blocks = len(hashes)
        excused = self._engine.excused_blocks
        blocks = self._engine.scheduler.kv_cache_manager.block_pool.blocks
        cached = [block for block in blocks if block.block_hash is not None and block.block_id not in excused]
        if not cached:
            return
        expected = np.stack(
            [self._expected[get_block_hash(block.block_hash)] + get_group_id(block.block_hash) for block in cached]
        )
        ids = [block.block_id for block in cached]
        self.num_blocks_checked += len(cached)
        for tensor in model.kv_caches.values():
            wrong = (tensor.numpy()[ids, 0, :, 0] != expected).any(axis=1).nonzero()[0]
            if len(wrong):
                block = cached[int(wrong[0])]
                message = (
                    f"vLLM's prefix cache offers block {block.block_id}, which holds other KV than it is hashed as "
                    f"({len(wrong)} of {len(cached)} cached blocks); {block.ref_cnt} requests hold it"
                )
                raise PoisonedCache(message)
