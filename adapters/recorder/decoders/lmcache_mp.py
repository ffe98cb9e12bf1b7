"""LMCache's multi-process connector: a range of tokens with its blocks for each request.

Of vLLM 0.32 (`kv_connector/v1/lmcache_mp_connector.py`), which lists the blocks of its only group, and of LMCache 0.5.6
(`lmcache/integration/vllm/lmcache_mp_metadata.py`), which lists those of each group; classes and fields have one name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvledger.adapters.recorded.payloads import Transferred


def copies(metadata: Any, _block_size: int) -> Iterator[tuple[str, Transferred]]:
    """What each request of a step stores and retrieves, one copy for each group that has blocks.

    How many tokens a block of the group has is not said; the range and the number of its blocks say it.
    """
    for request in metadata.requests:
        op, is_load = request.op, request.direction == "RETRIEVE"
        tables = op.block_ids if op.block_ids and not isinstance(op.block_ids[0], int) else [op.block_ids]
        for group, block_ids in enumerate(tables):
            if block_ids:
                block_size = (op.end - op.start) // len(block_ids)
                # What is cached locally at the beginning of the range is left as it is.
                kept = op.skip_first_n_tokens // block_size if is_load else 0
                job, first_block = f"{op.start}-{op.end}", op.start // block_size + kept
                copied = tuple(block_ids[kept:])
                yield request.request_id, Transferred(job, is_load, group, first_block, copied, is_whole=True)
