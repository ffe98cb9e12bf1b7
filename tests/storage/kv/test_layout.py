"""Pages are described from strides: what is found, what is refused, and that no byte is missed or invented."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvledger.storage.kv import HostPool, PageSegment, describe_blocks, describe_layer, make_copy_engine
from kvledger.storage.kv.errors import LayoutUnsupported


def test_k_and_v_side_by_side_are_one_segment() -> None:
    """The CPU layout of vLLM, `[num_blocks, kv_heads, block_size, 2 * head_size]` is contiguous in a block."""
    layer = describe_layer("l", torch.zeros(5, 2, 32, 16, dtype=torch.bfloat16), num_blocks=5)
    assert layer.segments == (PageSegment(offset_bytes=0, block_stride_bytes=2048, num_bytes=2048),)
    assert layer.page_bytes == 2048


def test_k_and_v_apart_are_two_segments() -> None:
    """`[2, num_blocks, block_size, heads, head_size]`: K pages, then V pages."""
    layer = describe_layer("l", torch.zeros(2, 5, 4, 3, 8), num_blocks=5)
    page = 4 * 3 * 8 * 4
    assert layer.segments == (PageSegment(0, page, page), PageSegment(5 * page, page, page))


def test_an_hnd_view_has_the_segments_of_the_memory_behind_it() -> None:
    """A permuted view changes how bytes are read, not which bytes are a page."""
    memory = torch.zeros(5, 3, 4, 8)
    hnd, nhd = memory, memory.permute(0, 2, 1, 3)
    assert describe_layer("l", hnd, num_blocks=5).segments == describe_layer("l", nhd, num_blocks=5).segments


def test_packed_layers_share_a_storage_and_differ_in_offset() -> None:
    """All layers' pages of a block side by side."""
    blocks = torch.zeros(5, 3, 64, dtype=torch.uint8)
    layout = describe_blocks({f"l{i}": blocks[:, i] for i in range(3)}, num_blocks=5)
    assert [layer.segments for layer in layout.layers] == [(PageSegment(64 * i, 192, 64),) for i in range(3)]
    assert layout.block_bytes == 192
    assert len({layer.storage.data_ptr() for layer in layout.layers}) == 1


def test_several_kernel_blocks_make_one_page() -> None:
    """A tensor with r times the blocks holds each block table entry in r successive kernel blocks."""
    layer = describe_layer("l", torch.zeros(10, 16, dtype=torch.int8), num_blocks=5, block_dim=0)
    assert layer.segments == (PageSegment(0, 32, 32),)
    apart = describe_layer("l", torch.zeros(2, 10, 16, dtype=torch.int8), num_blocks=5, block_dim=-2)
    assert apart.segments == (PageSegment(0, 32, 32), PageSegment(160, 32, 32))


def test_the_storage_is_shared_not_copied() -> None:
    """The description sees later writes, and offsets count from the storage's first byte."""
    memory = torch.zeros(64, dtype=torch.uint8)
    layer = describe_layer("l", memory[24:].view(4, 10), num_blocks=4)
    memory[24] = 9
    assert layer.storage[layer.segments[0].offset_bytes] == 9
    assert layer.storage.numel() == 64


def test_one_block_is_enough() -> None:
    """With one block its stride is never used, whatever the tensor says."""
    layer = describe_layer("l", torch.zeros(8, dtype=torch.uint8).as_strided((1, 8), (0, 1)), num_blocks=1, block_dim=0)
    assert layer.segments == (PageSegment(0, 8, 8),)


@pytest.mark.parametrize(
    ("tensor", "arguments", "reason"),
    [
        (torch.zeros(6, 6, 4), {"num_blocks": 6}, r"\(6, 6, 4\).*dimensions \[0, 1\].*pass block_dim"),
        (torch.zeros(6, 4), {"num_blocks": 5}, r"\(6, 4\).*none does; pass block_dim"),
        (torch.zeros(6, 4), {"num_blocks": 5, "block_dim": 0}, r"not a multiple of num_blocks=5"),
        (torch.zeros(6, 4), {"num_blocks": 6, "block_dim": 2}, r"block_dim=2 is not a dimension"),
        (torch.zeros(6, 1).expand(6, 4), {"num_blocks": 6}, r"overlap"),
        (torch.zeros(99).as_strided((6, 4), (2, 1)), {"num_blocks": 6}, r"overlap"),
        (torch.zeros(6, 0), {"num_blocks": 6}, r"empty"),
        (torch.zeros(6, 4), {"num_blocks": 0}, r"at least 1"),
        (torch.zeros(6, 4, device="meta"), {"num_blocks": 6}, r"no strided bytes"),
        (torch.zeros(6, 4).to_sparse(), {"num_blocks": 6}, r"no strided bytes"),
        (torch.zeros(5000, 6, 2), {"num_blocks": 6}, r"5000 runs of 8 bytes.*limit is 4096"),
        ([torch.zeros(6, 4)], {"num_blocks": 6}, r"is a list, not a tensor"),
    ],
)
def test_a_tensor_that_cannot_be_described_is_refused_with_reason_and_remedy(
    tensor: torch.Tensor, arguments: dict[str, int], reason: str
) -> None:
    """Nothing is guessed."""
    with pytest.raises(LayoutUnsupported, match=reason):
        describe_layer("layer.0", tensor, **arguments)


def test_no_layers_and_unknown_block_dims_are_refused() -> None:
    """An empty mapping has nothing to copy, and a misspelt layer name would otherwise go unnoticed."""
    with pytest.raises(LayoutUnsupported, match="empty"):
        describe_blocks({}, num_blocks=4)
    with pytest.raises(LayoutUnsupported, match="layr"):
        describe_blocks({"layer": torch.zeros(4, 4)}, num_blocks=4, block_dims={"layr": 0})


@st.composite
def strided_kv_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    """A non-overlapping strided tensor of bytes-as-int16 with gaps, its block dimension and its number of blocks."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    memory_order = draw(st.permutations(range(len(sizes))))
    strides, span = [0] * len(sizes), 1
    for axis in memory_order:
        strides[axis] = span + draw(st.integers(0, 3))
        span += (sizes[axis] - 1) * strides[axis]
    offset, block_dim = draw(st.integers(0, 4)), draw(st.integers(0, len(sizes) - 1))
    divisors = [d for d in range(1, sizes[block_dim] + 1) if sizes[block_dim] % d == 0]
    memory = torch.arange(offset + span + 3, dtype=torch.int16)
    return memory.as_strided(sizes, strides, offset), block_dim, draw(st.sampled_from(divisors))


@given(strided_kv_tensors())
def test_segments_name_each_byte_of_a_page_once_and_no_other(case: tuple[torch.Tensor, int, int]) -> None:
    """Over any strided tensor: the described bytes of each block are those torch's own indexing finds."""
    tensor, block_dim, num_blocks = case
    layer = describe_layer("l", tensor, num_blocks=num_blocks, block_dim=block_dim)
    per_page = tensor.shape[block_dim] // num_blocks
    for block_id in range(num_blocks):
        described = [
            byte
            for s in layer.segments
            for byte in range(
                s.offset_bytes + block_id * s.block_stride_bytes,
                s.offset_bytes + block_id * s.block_stride_bytes + s.num_bytes,
            )
        ]
        # The memory counts up from zero, so each value is its own element number.
        elements = tensor.narrow(block_dim, block_id * per_page, per_page).flatten().tolist()
        assert sorted(described) == sorted(2 * e + half for e in elements for half in (0, 1))
    assert layer.page_bytes * num_blocks == 2 * math.prod(tensor.shape)


@given(strided_kv_tensors(), st.randoms(use_true_random=False))
def test_any_described_tensor_survives_a_round_trip(case: tuple[torch.Tensor, int, int], order: random.Random) -> None:
    """Save every block, wipe the memory, load in place: pages are back, gaps stay wiped."""
    tensor, block_dim, num_blocks = case
    layout = describe_blocks({"l": tensor}, num_blocks=num_blocks, block_dims={"l": block_dim})
    pool = HostPool(num_blocks, layout.block_bytes, pin=False)
    engine = make_copy_engine(layout, pool)
    slots = list(range(num_blocks))
    order.shuffle(slots)
    before = tensor.clone()
    engine.start_save(range(num_blocks), slots)
    memory = layout.layers[0].storage
    memory.fill_(0xEE)
    engine.start_load(slots, range(num_blocks))
    assert torch.equal(tensor, before)
    assert int((memory == 0xEE).sum()) >= memory.numel() - layout.block_bytes * num_blocks
