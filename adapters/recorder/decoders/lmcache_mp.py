"""LMCache's multi-process connector. Its metadata has, for each request, a range of tokens and their blocks.

The connector is in vLLM 0.32 (`kv_connector/v1/lmcache_mp_connector.py`), and in LMCache 0.5.6
(`lmcache/integration/vllm/lmcache_mp_metadata.py`). The metadata's classes and fields have the same names in both. In
vLLM, the metadata has one list of blocks, for the only group. In LMCache, it has a list of blocks for each group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvledger.adapters.recorded.payloads import Transferred


def copies(metadata: Any, _block_size: int) -> Iterator[tuple[str, Transferred]]:
    """Yield one copy for each request and group. The block size is computed from the range and the number of blocks."""
    for request in metadata.requests:
        op, is_load = request.op, request.direction == "RETRIEVE"
        tables = op.block_ids if op.block_ids and not isinstance(op.block_ids[0], int) else [op.block_ids]
        for group, block_ids in enumerate(tables):
            if block_ids:
                block_size = (op.end - op.start) // len(block_ids)
                # A load skips the blocks at the beginning of the range that are cached locally.
                kept = op.skip_first_n_tokens // block_size if is_load else 0
                job, first_block = f"{op.start}-{op.end}", op.start // block_size + kept
                copied = tuple(block_ids[kept:])
                yield request.request_id, Transferred(job, is_load, group, first_block, copied, is_whole=True)
