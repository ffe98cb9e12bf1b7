"""NixlConnector, for pull and push (`kv_connector/v1/nixl/metadata.py`, vLLM 0.32).

Its metadata has the blocks of each group, by request. If another engine reads blocks of this engine, the metadata does
not name them. vLLM keeps these blocks for a request that has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvledger.adapters.recorded.payloads import REQUEST, STEP, Transferred


def copies(metadata: Any, _block_size: int) -> Iterator[tuple[str, Transferred]]:
    """Yield copies that receive blocks, save blocks to a host buffer within the step, or send blocks.

    In the request's table, received blocks come after the locally cached blocks (`pull_scheduler.py`,
    update_state_after_alloc). The index of the first received block is known only if the model has one group and the
    metadata has the number of cached blocks.
    """
    for request_id, received in metadata.reqs_to_recv.items():
        groups, cached = received.local_block_ids, received.local_num_computed_blocks
        first_block = cached[0] if len(groups) == len(cached) == 1 else -1
        yield from _of(request_id, groups, REQUEST, is_load=True, first_block=first_block)
    for request_id, saved in metadata.reqs_to_save.items():
        yield from _of(request_id, saved.local_block_ids, STEP, is_load=False)
    for request_id, groups in metadata.push_finished_blocks.items():
        yield from _of(request_id, groups, REQUEST, is_load=False)


def _of(
    request_id: str, groups: Sequence[Sequence[int]], ends_with: str, *, is_load: bool, first_block: int = -1
) -> Iterator[tuple[str, Transferred]]:
    for group, blocks in enumerate(groups):
        if blocks:
            yield request_id, Transferred(request_id, is_load, group, first_block, tuple(blocks), ends_with)
