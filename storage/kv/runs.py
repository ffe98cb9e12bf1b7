"""The byte runs of a block over all layers, as addresses: what engines that copy from address to address work on.

This room knows tensors and block ids. It must not know requests, chunks, tokens or any vLLM class.
"""

from __future__ import annotations

import attrs

from kvledger.storage.kv.layout import BlockLayout

__all__ = ["BlockRun", "runs_of_a_block"]


@attrs.frozen
class BlockRun:
    """One contiguous run of a block: absolute address for block 0, and its place in a slot. All in bytes."""

    address: int
    block_stride: int
    num_bytes: int
    slot_offset: int


def runs_of_a_block(layout: BlockLayout) -> list[BlockRun]:
    """The runs of a block in slot order; those that touch in memory as well as in the slot are one.

    Addresses own no memory: whoever keeps them keeps the layout too.
    """
    runs: list[BlockRun] = []
    slot_offset = 0
    for layer in layout.layers:
        for segment in layer.segments:
            run = BlockRun(
                address=layer.storage.data_ptr() + segment.offset_bytes,
                block_stride=segment.block_stride_bytes,
                num_bytes=segment.num_bytes,
                slot_offset=slot_offset,
            )
            slot_offset += run.num_bytes
            last = runs[-1] if runs else None
            if last and last.address + last.num_bytes == run.address and last.block_stride == run.block_stride:
                runs[-1] = attrs.evolve(last, num_bytes=last.num_bytes + run.num_bytes)
            else:
                runs.append(run)
    return runs
