"""The place of a block's bytes in each layer's memory, computed from the strides of the KV tensors.

A block has one or more contiguous runs of bytes in each layer (`PageSegment`). In neighbouring blocks, the same run is
a fixed distance (stride) apart. Only bytes are described, so this covers every dtype and these memory layouts: K and V
together or apart, NHD and HND, MLA, and all layers of a block side by side. Blocks are copied completely. Some
attention backends interleave the tokens of a block, so no part of a block belongs to particular tokens.

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
"""Maximum number of runs of a block in one layer. More runs mean that the block dimension is not the right one."""


@attrs.frozen
class PageSegment:
    """One contiguous run of bytes that each block has in a layer.

    The run of block `block_id` starts at byte `offset_bytes + block_id * block_stride_bytes` of the layer's storage.
    """

    offset_bytes: int
    block_stride_bytes: int
    num_bytes: int


@attrs.frozen
class LayerPages:
    """Where the blocks are in one layer's memory.

    `storage` is a 1-D uint8 view of the whole untyped storage of the layer's tensor, and keeps that memory alive.
    `segments` are the runs of each block in this layer, in the order in which a slot stores them.
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
    """One contiguous run of bytes of a block. `address` is the run's address in block 0. All numbers are in bytes."""

    storage: torch.Tensor = attrs.field(eq=False, repr=False)
    """The memory that contains the run, uint8 `[bytes]`."""
    address: int
    block_stride: int
    num_bytes: int
    slot_offset: int

    @property
    def offset(self) -> int:
        """Offset in `storage` at which the run of block 0 begins, in bytes."""
        return self.address - self.storage.data_ptr()

    def touches(self, other: BlockRun) -> bool:
        """Whether, in every block, the run `other` begins directly after this run in memory."""
        return (
            self.storage.data_ptr() == other.storage.data_ptr()
            and self.address + self.num_bytes == other.address
            and self.block_stride == other.block_stride
        )


@attrs.frozen
class BlockLayout:
    """Where the blocks are in the memory of all layers. A block has a part in each layer."""

    layers: tuple[LayerPages, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers together. A host slot has this size."""
        return sum(layer.page_bytes for layer in self.layers)

    @property
    def num_blocks(self) -> int:
        """Number of blocks. It is the same in every layer."""
        return self.layers[0].num_blocks

    @property
    def device(self) -> torch.device:
        """The device of all layers."""
        return self.layers[0].storage.device

    def rows(self) -> list[torch.Tensor]:
        """Return one view per segment, in the order in which a slot stores the segments.

        Each view is uint8 `[num_blocks, num_bytes]`.
        """
        return [
            layer.storage.as_strided(
                (self.num_blocks, segment.num_bytes), (segment.block_stride_bytes, 1), segment.offset_bytes
            )
            for layer in self.layers
            for segment in layer.segments
        ]

    def runs(self) -> list[BlockRun]:
        """Return the runs of a block, in the order in which a slot stores them.

        Successive runs that touch in memory are merged. The runs keep the memory of the tensors alive.
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
    """One dimension of a KV tensor. `axis` is its number in the tensor.

    Dimensions with equal strides are sorted by `axis`, so that equal tensors get equal descriptions.
    """

    axis: int
    size: int
    stride_bytes: int


def describe_layer(
    layer_name: str, tensor: torch.Tensor, *, num_blocks: int, block_dim: int | None = None
) -> LayerPages:
    """Describe where the blocks are in one layer's KV tensor.

    Args:
        layer_name: Name under which the layer's tensor is registered, for messages.
        tensor: A strided tensor without overlapping elements. It can be permuted, padded, or a view into a larger
            allocation.
        num_blocks: Number of blocks of the scheduler. A kernel may use smaller blocks.
        block_dim: Dimension of `tensor` that counts blocks. Its size is `num_blocks`. If the kernel's blocks are r
            times smaller than the scheduler's, its size is `num_blocks * r`, and a block has r consecutive kernel
            blocks. None: the only dimension of size `num_blocks`. Pass the dimension if you know it.

    Raises:
        LayoutUnsupported: The tensor has no block dimension or several possible ones, its elements overlap, it is empty
            or has no strided memory, or a block has more than `MAX_SEGMENTS_PER_BLOCK` runs.
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
            f"dimension {block_axis} is probably not the block dimension; pass the right one as block_dim"
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
    """Describe every layer of `kv_caches`. A slot stores the layers in the order of `kv_caches`.

    If several layers have exactly the same memory (KV sharing across layers), only the first of them is described.
    `block_dims` is layer name → the `block_dim` of `describe_layer`.

    Raises:
        LayoutUnsupported: `describe_layer` raised it, there is no layer, the layers are on several devices, or
            `block_dims` has an unknown layer.
    """
    block_dims = block_dims or {}
    if unknown := sorted(set(block_dims) - set(kv_caches)):
        raise LayoutUnsupported(f"block_dims has {unknown}, which are not in kv_caches; known: {sorted(kv_caches)}")
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
            f"the layers are on several devices {devices}; describe the layers of each device separately"
        )
    return BlockLayout(tuple(layers))


def _refuse_without_memory(layer_name: str, tensor: object, num_blocks: int) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise LayoutUnsupported(
            f"layer {layer_name!r} is a {type(tensor).__name__}, not a tensor; register each of its tensors under "
            "a name of its own"
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
                f"the size of dimension {block_dim} of layer {layer_name!r} of shape {shape} is not a multiple of "
                f"num_blocks={num_blocks}; pass the block_dim that counts blocks, or the tensor's own num_blocks"
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
    """Raise `LayoutUnsupported` if elements overlap.

    Elements do not overlap if each stride is at least as large as the span of all dimensions with smaller strides.
    """
    span_bytes = item_bytes
    for dimension in sorted(dimensions, key=lambda d: d.stride_bytes):
        if dimension.stride_bytes < span_bytes:
            raise LayoutUnsupported(
                f"layer {layer_name!r} of shape {tuple(tensor.shape)} and strides {tensor.stride()}: dimension "
                f"{dimension.axis} has a stride of {dimension.stride_bytes} bytes, but the elements in it span "
                f"{span_bytes} bytes, so elements overlap or interleave; pass the tensor that this view was made from"
            )
        span_bytes += (dimension.size - 1) * dimension.stride_bytes
