"""The place of a block's bytes in each layer's memory, derived from the strides of the KV tensors.

A *page* is the memory of one block id in one layer. It consists of one or more contiguous byte runs (`PageSegment`),
each of which recurs at a fixed stride from block to block. This covers K and V together or apart, NHD and HND, MLA, all
layers of a block packed side by side, and every dtype, because only bytes are described. Pages are copied whole: some
attention backends interleave the tokens of a block, so a row of a page has no meaning of its own.

This module knows tensors and block ids. It must not know requests, chunks, tokens or any vLLM class.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import attrs
import torch

from kvledger.storage.kv.errors import LayoutUnsupported

__all__ = ["MAX_SEGMENTS_PER_BLOCK", "BlockLayout", "LayerPages", "PageSegment", "describe_blocks", "describe_layer"]

MAX_SEGMENTS_PER_BLOCK = 4096
"""Most runs in one layer's page. More mean that the wrong dimension was taken for the block dimension."""


@attrs.frozen
class PageSegment:
    """One contiguous run of a block's page. It starts at byte `offset_bytes + block_id * block_stride_bytes`."""

    offset_bytes: int
    block_stride_bytes: int
    num_bytes: int


@attrs.frozen
class LayerPages:
    """The pages of one layer.

    `storage` is a 1-D uint8 view of the layer's whole untyped storage and keeps that memory alive. `segments` are
    ordered by their place in a page.
    """

    layer_name: str
    storage: torch.Tensor = attrs.field(eq=False, repr=False)
    segments: tuple[PageSegment, ...]
    num_blocks: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in this layer."""
        return sum(segment.num_bytes for segment in self.segments)


@attrs.frozen
class BlockRun:
    """One contiguous run of a block: its address for block 0 and its offset in a slot. All numbers are in bytes."""

    storage: torch.Tensor = attrs.field(eq=False, repr=False)
    """The memory that contains the run, uint8 `[bytes]`."""
    address: int
    block_stride: int
    num_bytes: int
    slot_offset: int

    @property
    def offset(self) -> int:
        """Offset of the run for block 0 in `storage`, in bytes."""
        return self.address - self.storage.data_ptr()

    def touches(self, other: BlockRun) -> bool:
        """Whether `other` begins where this one ends, for every block."""
        return (
            self.storage.data_ptr() == other.storage.data_ptr()
            and self.address + self.num_bytes == other.address
            and self.block_stride == other.block_stride
        )


@attrs.frozen
class BlockLayout:
    """The pages of all layers. A block id addresses one page in each layer."""

    layers: tuple[LayerPages, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers: the size of a host slot."""
        return sum(layer.page_bytes for layer in self.layers)

    @property
    def num_blocks(self) -> int:
        """Number of blocks, the same in every layer."""
        return self.layers[0].num_blocks

    @property
    def device(self) -> torch.device:
        """The device of all layers."""
        return self.layers[0].storage.device

    def rows(self) -> list[torch.Tensor]:
        """Return a view of each segment of all blocks, in slot order, each uint8 `[num_blocks, num_bytes]`."""
        return [
            layer.storage.as_strided(
                (self.num_blocks, segment.num_bytes), (segment.block_stride_bytes, 1), segment.offset_bytes
            )
            for layer in self.layers
            for segment in layer.segments
        ]

    def runs(self) -> list[BlockRun]:
        """Return the runs of a block in slot order. Runs that touch both in memory and in the slot are merged.

        The list keeps the tensors' memory alive; addresses alone would not.
        """
        runs: list[BlockRun] = []
        slot_offset = 0
        for layer in self.layers:
            for segment in layer.segments:
                run = BlockRun(
                    storage=layer.storage,
                    address=layer.storage.data_ptr() + segment.offset_bytes,
                    block_stride=segment.block_stride_bytes,
                    num_bytes=segment.num_bytes,
                    slot_offset=slot_offset,
                )
                slot_offset += run.num_bytes
                last = runs[-1] if runs else None
                if last and last.touches(run):
                    runs[-1] = attrs.evolve(last, num_bytes=last.num_bytes + run.num_bytes)
                else:
                    runs.append(run)
        return runs


@attrs.frozen
class _Dimension:
    """One dimension of a page. `axis` is its number in the tensor and breaks ties, so that equal layouts stay equal."""

    axis: int
    size: int
    stride_bytes: int


def describe_layer(
    layer_name: str, tensor: torch.Tensor, *, num_blocks: int, block_dim: int | None = None
) -> LayerPages:
    """Describe the pages of one layer's KV tensor.

    Args:
        layer_name: The layer's registered name, for messages.
        tensor: Any strided tensor without overlapping elements: permuted, padded, or a view into a larger allocation.
        num_blocks: Number of blocks, counted as in the block table.
        block_dim: The dimension that counts blocks. Its size is `num_blocks`, or `num_blocks * r` if the kernel's
            blocks are r times smaller than those of the block table; r consecutive kernel blocks are then one page.
            None takes the only dimension of size `num_blocks`. Pass the dimension if you know it.

    Raises:
        LayoutUnsupported: The block dimension is absent or ambiguous, elements overlap, the tensor is empty or has no
            strided memory, or a page has more than `MAX_SEGMENTS_PER_BLOCK` runs.
    """
    _refuse_without_memory(layer_name, tensor, num_blocks)
    block_axis = _block_axis(layer_name, tensor, num_blocks, block_dim)
    item_bytes = tensor.element_size()
    kernel_blocks = tensor.shape[block_axis] // num_blocks
    kernel_stride_bytes = tensor.stride(block_axis) * item_bytes

    page = [
        _Dimension(axis, tensor.shape[axis], tensor.stride(axis) * item_bytes)
        for axis in range(tensor.ndim)
        if axis != block_axis and tensor.shape[axis] > 1
    ]
    if kernel_blocks > 1:
        page.append(_Dimension(block_axis, kernel_blocks, kernel_stride_bytes))
    # Outermost in memory first, so that segments are in ascending order however the view is permuted.
    page.sort(key=lambda dimension: (-dimension.stride_bytes, dimension.axis))
    blocks = _Dimension(block_axis, num_blocks, kernel_blocks * kernel_stride_bytes)
    _refuse_overlap(layer_name, tensor, [*page, blocks] if num_blocks > 1 else page, item_bytes)

    run_bytes, outer = item_bytes, list(page)
    while outer and outer[-1].stride_bytes == run_bytes:
        run_bytes *= outer.pop().size
    num_runs = 1
    for dimension in outer:
        num_runs *= dimension.size
    if num_runs > MAX_SEGMENTS_PER_BLOCK:
        raise LayoutUnsupported(
            f"layer {layer_name!r} of shape {tuple(tensor.shape)} and strides {tensor.stride()} would need "
            f"{num_runs} runs of {run_bytes} bytes for each block, but the limit is {MAX_SEGMENTS_PER_BLOCK}; "
            f"dimension {block_axis} is probably not the block dimension: pass block_dim"
        )
    first_byte = int(tensor.storage_offset()) * item_bytes
    # A dimension of size 1 may have any stride, even 0. With one block its stride is never used.
    block_stride_bytes = blocks.stride_bytes if num_blocks > 1 else run_bytes
    segments = tuple(
        PageSegment(
            offset_bytes=first_byte + sum(i * d.stride_bytes for i, d in zip(index, outer, strict=True)),
            block_stride_bytes=block_stride_bytes,
            num_bytes=run_bytes,
        )
        for index in itertools.product(*(range(dimension.size) for dimension in outer))
    )
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return LayerPages(layer_name=layer_name, storage=storage, segments=segments, num_blocks=num_blocks)


def describe_blocks(
    kv_caches: Mapping[str, torch.Tensor], *, num_blocks: int, block_dims: Mapping[str, int] | None = None
) -> BlockLayout:
    """Describe every layer of `kv_caches`. Slots hold the layers in the same order.

    Layers with exactly the same bytes (KV sharing across layers) are kept once, under the first name. `block_dims` maps
    layer names to the `block_dim` of `describe_layer`.

    Raises:
        LayoutUnsupported: As in `describe_layer`; or there is no layer, the layers are on several devices, or
            `block_dims` names an unknown layer.
    """
    block_dims = block_dims or {}
    if unknown := sorted(set(block_dims) - set(kv_caches)):
        raise LayoutUnsupported(f"block_dims names {unknown}, which are not in kv_caches; known: {sorted(kv_caches)}")
    layers: list[LayerPages] = []
    seen: set[tuple[torch.device, int, tuple[PageSegment, ...]]] = set()
    for layer_name, tensor in kv_caches.items():
        layer = describe_layer(layer_name, tensor, num_blocks=num_blocks, block_dim=block_dims.get(layer_name))
        key = (layer.storage.device, layer.storage.data_ptr(), layer.segments)
        if key not in seen:
            seen.add(key)
            layers.append(layer)
    if not layers:
        raise LayoutUnsupported("kv_caches is empty: there is nothing to copy; register the KV tensors first")
    devices = sorted({str(layer.storage.device) for layer in layers})
    if len(devices) > 1:
        raise LayoutUnsupported(
            f"layers lie on several devices {devices}; describe the layers of each device separately"
        )
    return BlockLayout(tuple(layers))


def _refuse_without_memory(layer_name: str, tensor: object, num_blocks: int) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise LayoutUnsupported(
            f"layer {layer_name!r} is a {type(tensor).__name__}, not a tensor; register each of its tensors by "
            "its own name"
        )
    if num_blocks < 1:
        raise LayoutUnsupported(
            f"num_blocks={num_blocks} for layer {layer_name!r}; pass the number of blocks, at least 1"
        )
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise LayoutUnsupported(
            f"layer {layer_name!r} has layout {tensor.layout} on {tensor.device}: there are no strided bytes to copy; "
            "pass a dense tensor with memory"
        )
    if tensor.numel() == 0:
        raise LayoutUnsupported(
            f"layer {layer_name!r} of shape {tuple(tensor.shape)} is empty; leave it out of kv_caches"
        )


def _block_axis(layer_name: str, tensor: torch.Tensor, num_blocks: int, block_dim: int | None) -> int:
    shape = tuple(tensor.shape)
    if block_dim is not None:
        if not -tensor.ndim <= block_dim < tensor.ndim:
            raise LayoutUnsupported(
                f"block_dim={block_dim} is not a dimension of layer {layer_name!r} of shape {shape}; "
                f"pass one of 0..{tensor.ndim - 1}"
            )
        if shape[block_dim] % num_blocks:
            raise LayoutUnsupported(
                f"dimension {block_dim} of layer {layer_name!r} of shape {shape} is not a multiple of num_blocks="
                f"{num_blocks}; pass the block_dim that counts blocks, or the num_blocks this tensor was made for"
            )
        return block_dim % tensor.ndim
    candidates = [axis for axis, size in enumerate(shape) if size == num_blocks]
    if len(candidates) != 1:
        found = f"dimensions {candidates} do" if candidates else "none does"
        raise LayoutUnsupported(
            f"exactly one dimension of layer {layer_name!r} of shape {shape} must have size num_blocks={num_blocks}, "
            f"but {found}; pass block_dim"
        )
    return candidates[0]


def _refuse_overlap(layer_name: str, tensor: torch.Tensor, dimensions: list[_Dimension], item_bytes: int) -> None:
    """Refuse overlapping elements: each stride must be at least the span of all dimensions with smaller strides."""
    span_bytes = item_bytes
    for dimension in sorted(dimensions, key=lambda d: d.stride_bytes):
        if dimension.stride_bytes < span_bytes:
            raise LayoutUnsupported(
                f"layer {layer_name!r} of shape {tuple(tensor.shape)} and strides {tensor.stride()}: dimension "
                f"{dimension.axis} steps {dimension.stride_bytes} bytes over elements that span {span_bytes}, so "
                "elements overlap or interleave; pass the tensor that the view shows"
            )
        span_bytes += (dimension.size - 1) * dimension.stride_bytes
