"""KV tensors to test copy engines on: every layout, full of noise, with torch's own indexing as the oracle.

Each layout is a tensor view on a larger allocation, so that a wrong stride and a byte written next to a page both show.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping

import attrs
import torch

from kvledger.storage.kv import BlockLayout, describe_blocks

NUM_BLOCKS = 11
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.float8_e4m3fn)


@attrs.frozen
class Geometry:
    """Layer shapes and strides in elements within one allocation; `kernel_blocks` of them on `block_dim` are a page."""

    num_elements: int
    layers: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], int]]
    block_dim: int
    kernel_blocks: int = 1


def _dense(shape: tuple[int, ...], block_dim: int, order: tuple[int, ...] | None = None, **more: int) -> Geometry:
    """Two layers, one after the other, each dense with its dimensions in `order` of memory, outermost first."""
    strides, size = [0] * len(shape), 1
    for axis in reversed(order or tuple(range(len(shape)))):
        strides[axis], size = size, size * shape[axis]
    gap = 5  # An odd gap, so that the second layer is not aligned to anything.
    layers = {f"layer.{i}": (shape, tuple(strides), 3 + i * (size + gap)) for i in range(2)}
    return Geometry(2 * (size + gap) + 3, layers, block_dim, **more)


def _packed(page: int, num_layers: int, padding: int) -> Geometry:
    """All layers' pages of a block side by side, the block padded at its end."""
    block = num_layers * page + padding
    shape, strides = (NUM_BLOCKS, 4, page // 4), (block, page // 4, 1)
    return Geometry(NUM_BLOCKS * block, {f"layer.{i}": (shape, strides, i * page) for i in range(num_layers)}, 0)


KV_LAYOUTS: Mapping[str, Geometry] = {
    "k_and_v_side_by_side": _dense((NUM_BLOCKS, 2, 4, 2 * 8), 0),
    "k_and_v_apart_nhd": _dense((2, NUM_BLOCKS, 4, 3, 8), 1),
    "k_and_v_apart_hnd": _dense((2, NUM_BLOCKS, 4, 3, 8), 1, (0, 1, 3, 2, 4)),
    "hnd_view_of_one_tensor": _dense((NUM_BLOCKS, 2, 4, 3, 8), 0, (0, 1, 3, 2, 4)),
    "heads_outside_blocks": _dense((NUM_BLOCKS, 3, 4, 16), 0, (1, 0, 2, 3)),
    "mla": _dense((NUM_BLOCKS, 4, 18), 0),
    "odd_page": _dense((NUM_BLOCKS, 3, 7), 0),
    "packed_blocks": _packed(32, 3, 0),
    "packed_blocks_with_padding": _packed(32, 3, 16),
    "kernel_blocks_smaller_than_pages": _dense((2, NUM_BLOCKS * 2, 4, 8), 1, kernel_blocks=2),
    "large_pages": _dense((NUM_BLOCKS, 16, 8, 1024), 0),
    "layers_of_different_size": Geometry(
        NUM_BLOCKS * 96,
        {"small": ((NUM_BLOCKS, 32), (32, 1), 0), "large": ((NUM_BLOCKS, 64), (64, 1), NUM_BLOCKS * 32)},
        0,
    ),
}


@attrs.frozen
class KVMemory:
    """KV tensors over one allocation, with what a test needs to know about them."""

    allocation: torch.Tensor
    kv_caches: Mapping[str, torch.Tensor]
    geometry: Geometry

    def layout(self) -> BlockLayout:
        """The layout under test."""
        dims = dict.fromkeys(self.kv_caches, self.geometry.block_dim)
        return describe_blocks(self.kv_caches, num_blocks=NUM_BLOCKS, block_dims=dims)

    def pages(self, block_id: int) -> list[torch.Tensor]:
        """Views of the block's pages by torch's own indexing."""
        size = self.geometry.kernel_blocks
        return [t.narrow(self.geometry.block_dim, block_id * size, size) for t in self.kv_caches.values()]

    def scramble(self, generator: torch.Generator) -> None:
        """Fill the allocation with noise."""
        noise = torch.randint(0, 256, (self.allocation.nbytes,), dtype=torch.uint8, generator=generator)
        self.allocation.view(torch.uint8).copy_(noise)

    def bytes(self) -> torch.Tensor:
        """A copy of every byte of the allocation, also those that no page owns."""
        return self.allocation.view(torch.uint8).cpu().clone()

    def clone(self) -> KVMemory:
        """The same tensors over a copy of the allocation."""
        return _over(self.allocation.clone(), self.geometry)

    def to(self, device: torch.device) -> KVMemory:
        """The same over a copy on that device."""
        return _over(self.allocation.to(device, copy=True), self.geometry)


def _over(allocation: torch.Tensor, geometry: Geometry) -> KVMemory:
    caches = {name: allocation.as_strided(*layer) for name, layer in geometry.layers.items()}
    return KVMemory(allocation, caches, geometry)


def make_kv_memory(geometry: Geometry, dtype: torch.dtype, device: str, generator: torch.Generator) -> KVMemory:
    """KV tensors of that geometry and type, full of noise (NaNs and all)."""
    memory = _over(torch.empty(geometry.num_elements, dtype=dtype, device=device), geometry)
    memory.scramble(generator)
    return memory


def printed_seed() -> int:
    """A fresh seed, printed so that pytest shows it on failure; `KVLEDGER_TEST_SEED` sets it to repeat one."""
    seed = int(os.environ.get("KVLEDGER_TEST_SEED") or random.SystemRandom().randrange(2**32))
    print(f"KVLEDGER_TEST_SEED={seed}")
    return seed
