"""Who listens to KV events, as a router does: which blocks lie where, held against what was said of them before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored

WHOLE_HASHES: Mapping[str, str] = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}
"""Makes vLLM publish block hashes whole, not their last 64 bits, so that a chunk's key can be told from them."""


@attrs.frozen
class Block:
    """One block, as its event describes it."""

    parent: Any
    token_ids: tuple[int, ...]
    extra_keys: Any
    group: int
    kind: str


@attrs.define
class Subscriber:
    """Stands in for vLLM's publisher, or is given what came over a real one."""

    on_host: dict[Any, Block] = attrs.field(factory=dict)
    """Block hash -> what was said of it, of blocks that can be loaded."""
    ever_on_device: dict[Any, Block] = attrs.field(factory=dict)
    """The same of all blocks that vLLM has ever had."""
    num_stored: int = 0
    num_removed: int = 0

    def publish(self, batch: Any) -> None:
        """One step's events, in order (`distributed/kv_events.py`, EventPublisher)."""
        for event in batch.events:
            self._take(event)

    def shutdown(self) -> None:
        """Nothing to close."""

    def _take(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):  # vLLM's, of the device
            return
        if event.medium == MEDIUM_GPU:
            if isinstance(event, BlockStored):
                self.ever_on_device.update(blocks_of(event))
            return
        assert event.medium == MEDIUM_CPU
        assert event.locality == "LOCAL"
        if isinstance(event, BlockStored):
            self._stored(event)
        else:
            self._removed(event)

    def _stored(self, event: BlockStored) -> None:
        assert len(event.token_ids) == len(event.block_hashes) * event.block_size
        for block_hash, block in blocks_of(event):
            assert block_hash not in self.on_host, "a block is published a second time"
            known = self.ever_on_device.get(block_hash)
            assert known is None or known == block, "a block is not described as on the device"
            self.on_host[block_hash] = block
            self.num_stored += 1

    def _removed(self, event: BlockRemoved) -> None:
        for block_hash in event.block_hashes:
            assert block_hash in self.on_host, "a block is removed that was not published"
            del self.on_host[block_hash]
            self.num_removed += 1


def blocks_of(event: BlockStored) -> Iterable[tuple[Any, Block]]:
    """Block hash and description, block by block."""
    parent = event.parent_block_hash
    extra_keys = event.extra_keys or [None] * len(event.block_hashes)
    for number, (block_hash, extra) in enumerate(zip(event.block_hashes, extra_keys, strict=True)):
        token_ids = event.token_ids[number * event.block_size : (number + 1) * event.block_size]
        yield (
            block_hash,
            Block(
                parent,
                tuple(token_ids),
                None if extra is None else tuple(extra),
                event.group_idx or 0,
                event.kv_cache_spec_kind or "",
            ),
        )
        parent = block_hash


def assert_told(subscriber: Subscriber, side: Any) -> None:
    """After a step: published is exactly what can be loaded, block by block; less where the log could not be written.

    Verifies: the blocks of every committed chunk, by their hashes and the last one's key; nothing where nothing is
    served. Does not verify: that their bytes are right, as every load does.
    """
    journal = side.journal
    if journal.is_disabled:
        assert not subscriber.on_host, "blocks are still published that nobody will load"
        return
    committed = side.ledger.projections.pool
    blocks_per_chunk = journal.configuration.chunk_size // journal.configuration.block_size
    if not blocks_per_chunk:
        assert not subscriber.on_host, "chunks within blocks are published"
        return
    by_key = {block_hash[:16]: block_hash for block_hash in subscriber.on_host}
    expected = set()
    for key in committed:
        block_hash = by_key.get(key)
        if block_hash is None:
            assert not journal.is_whole, "a chunk can be loaded and is not published"
            continue
        for _ in range(blocks_per_chunk):
            expected.add(block_hash)
            block_hash = subscriber.on_host[block_hash].parent
    assert expected == set(subscriber.on_host), "a block is published that cannot be loaded"
