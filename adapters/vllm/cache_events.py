"""Makes KV events, which tell routers what blocks can be loaded from the host pool (`take_events`).

A KV event describes a block as vLLM describes a block on the device, except for the medium. kvledger makes KV events
from the decisions in the log, and does not record them in the log. kvledger publishes a chunk as stored when its save
is completed. It publishes the chunk as removed when the chunk is evicted or tainted, or the cache is reset. Token ids,
salts and adapters are read from the request when the save is issued, and kept until they are published. They never
enter the log. kvledger publishes events only if vLLM's `kv_events_config` asks for them. This module makes no
decisions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
from msgspec.structs import replace
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    ExternalBlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from kvledger.adapters.vllm import versions
from kvledger.adapters.vllm.chunk_keys import key_of_hash
from kvledger.adapters.vllm.messages import messages
from kvledger.lifecycle import described, raise_if_unstoppable
from kvledger.lifecycle import events as e

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvledger.lifecycle import LedgerConfiguration, Projections

_LOCAL = "LOCAL"


@attrs.frozen
class ChunkBlocks:
    """Describes a chunk's blocks as vLLM's block pool does (`v1/core/block_pool.py`, 0.32). All sizes are in tokens."""

    chunk_size: int
    """A multiple of the block size."""
    block_size: int
    hash_block_size: int
    group: int
    """Number of the first group that has no window. All KV events are about this group."""
    kind: str

    def stored(self, request: Request, chunk: int, key: bytes) -> BlockStored | None:
        """Return the event that chunk number `chunk` is stored.

        None if `key` was not made from vLLM's hash of the chunk's last block.
        """
        first_token, end = chunk * self.chunk_size, (chunk + 1) * self.chunk_size
        hashes, step = request.block_hashes, self.hash_block_size
        if end // step > len(hashes) or key_of_hash(request, hashes[end // step - 1]) != key:
            return None
        starts = range(first_token, end, self.block_size)
        adapter = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(hashes[(start + self.block_size) // step - 1]) for start in starts],
            parent_block_hash=maybe_convert_block_hash(hashes[first_token // step - 1]) if chunk else None,
            token_ids=list(request.all_token_ids[first_token:end]),
            block_size=self.block_size,
            lora_id=adapter.adapter_id if adapter else None,
            medium=MEDIUM_CPU,
            lora_name=adapter.name if adapter else None,
            extra_keys=to_event_extra_keys(
                [generate_block_hash_extra_keys(request, start, start + self.block_size, 0)[0] for start in starts]
            ),
            group_idx=self.group,
            kv_cache_spec_kind=self.kind,
            locality=_LOCAL,
        )

    def behind(self, num_blocks: int, stored: BlockStored) -> BlockStored:
        """Return the event `stored` without its first `num_blocks` blocks, which are already published."""
        if not num_blocks:
            return stored
        return replace(
            stored,
            block_hashes=stored.block_hashes[num_blocks:],
            parent_block_hash=stored.block_hashes[num_blocks - 1],
            token_ids=stored.token_ids[num_blocks * self.block_size :],
            extra_keys=stored.extra_keys and stored.extra_keys[num_blocks:],
        )

    def removed(self, block_hashes: list[ExternalBlockHash]) -> BlockRemoved:
        """Return the event that these blocks can no longer be loaded."""
        return BlockRemoved(block_hashes=block_hashes, medium=MEDIUM_CPU, group_idx=self.group, locality=_LOCAL)


def chunk_blocks(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, configuration: LedgerConfiguration
) -> ChunkBlocks | None:
    """Return the object that makes the KV events about chunks.

    None if vLLM publishes no KV events, or if a chunk is smaller than a block.
    """
    events = vllm_config.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        return None
    if configuration.chunk_size < configuration.block_size:
        messages.warning(
            "chunk_size is less than a block, and KV events describe whole blocks, so kvledger publishes no KV events "
            "of the host pool; set chunk_size to a multiple of the block size",
            chunk_size=configuration.chunk_size,
            block_size=configuration.block_size,
        )
        return None
    group = configuration.windows.index(0)
    return ChunkBlocks(
        chunk_size=configuration.chunk_size,
        block_size=configuration.block_size,
        hash_block_size=versions.hash_block_size(kv_cache_config),
        group=group,
        kind=get_kv_cache_spec_kind(kv_cache_config.kv_cache_groups[group].kv_cache_spec).value,
    )


class CacheEvents:
    """Follows decisions, and collects KV events about chunks that are stored or removed."""

    def __init__(self, blocks: ChunkBlocks, projections: Projections, requests: Mapping[str, Request]) -> None:
        self._blocks = blocks
        self._projections = projections
        self._requests = requests
        self._saving: dict[int, dict[bytes, BlockStored]] = {}
        """Job id of a save in flight → (chunk key → the chunk's blocks, which can be loaded after the save)."""
        self._stored: dict[bytes, BlockStored] = {}
        """Chunk key → blocks that can be loaded and are not published yet."""
        self._published: dict[bytes, Sequence[ExternalBlockHash]] = {}
        """Chunk key → hashes of the chunk's blocks, for published chunks."""
        self._num_chunks: dict[ExternalBlockHash, int] = {}
        """Hash of a published block → number of published chunks with this block. Two chunks share their first
        blocks if their prompts diverge later within the chunk."""
        self._removed: list[ExternalBlockHash] = []
        """Hashes of published blocks that can no longer be loaded, until their removal is published."""
        self._is_stopped = False

    def follow(self, event: e.Event, decisions: Sequence[e.Event]) -> None:
        """Collect the blocks that an event and its decisions store or remove. Call this after folding. Never raises."""
        if self._is_stopped:
            return
        try:
            if isinstance(event, e.CacheReset):
                self._remove_all()
            for decision in decisions:
                self._take(decision)
        except BaseException as error:  # noqa: BLE001 -- read from live objects of vLLM; routers matter less than requests
            raise_if_unstoppable(error)
            self.stop()
            messages.error(
                "KV events of the host pool stop until the engine restarts, because of an error; the last KV events "
                "publish all blocks as removed",
                error=described(error),
            )

    def take(self, *, is_written: bool) -> list[KVCacheEvent]:
        """Return the KV events of all changes since the last call, removals first.

        Stored blocks are returned only if the log contains their saves (`is_written`), otherwise in a later call.
        Removals are returned at once.
        """
        events: list[KVCacheEvent] = []
        if self._removed:
            events.append(self._blocks.removed(self._removed))
            self._removed = []
        if is_written:
            for key, stored in self._stored.items():
                num_known = self._count(stored.block_hashes)
                self._published[key] = stored.block_hashes
                if num_known < len(stored.block_hashes):
                    events.append(self._blocks.behind(num_known, stored))
            self._stored = {}
        return events

    def stop(self) -> None:
        """Let the next `take` publish all blocks as removed, and follow no more decisions."""
        self._is_stopped = True
        self._saving.clear()
        self._remove_all()

    def _take(self, decision: e.Event) -> None:
        if isinstance(decision, e.SaveIssued):
            request = self._requests.get(decision.request_id)
            if request is not None:
                self._saving[decision.job_id] = self._read(request, decision)
        elif isinstance(decision, e.SaveCompleted):
            for key, stored in self._saving.pop(decision.job_id, {}).items():
                if key not in self._published and self._projections.pool.get(key) is not None:
                    self._stored[key] = stored
        elif isinstance(decision, e.SaveFailed):
            self._saving.pop(decision.job_id, None)
        elif isinstance(decision, e.ChunksEvicted | e.ChunksTainted):
            for key in decision.keys:
                self._remove(key)

    def _read(self, request: Request, save: e.SaveIssued) -> dict[bytes, BlockStored]:
        """Describe a save's chunks when the save is issued. The request may be gone when the save is completed."""
        record = self._projections.tracker.of(save.ordinal)
        keys = [] if record is None else record.keys
        found = {}
        for chunk in save.chunks:
            stored = self._blocks.stored(request, chunk, keys[chunk]) if chunk < len(keys) else None
            if stored is not None:
                found[keys[chunk]] = stored
        return found

    def _count(self, block_hashes: Sequence[ExternalBlockHash]) -> int:
        """Record that one more published chunk has these blocks.

        Returns how many of these blocks were already in a published chunk.
        """
        num_known = 0
        for block_hash in block_hashes:
            num_chunks = self._num_chunks.get(block_hash, 0)
            self._num_chunks[block_hash] = num_chunks + 1
            num_known += num_chunks > 0
        return num_known

    def _remove(self, key: bytes) -> None:
        self._stored.pop(key, None)
        for block_hash in self._published.pop(key, ()):
            self._num_chunks[block_hash] -= 1
            if not self._num_chunks[block_hash]:
                del self._num_chunks[block_hash]
                self._removed.append(block_hash)

    def _remove_all(self) -> None:
        self._stored.clear()
        self._published.clear()
        self._removed += self._num_chunks
        self._num_chunks.clear()
