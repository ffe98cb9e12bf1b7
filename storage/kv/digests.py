"""Digests of pages, made where they lie: 64 bits for a block over the bytes of all its layers, or for a slot.

A block and the slot that it was copied to have equal digests. Nothing but the digests leaves the device. Equal bytes in
another order have another digest, but nobody is kept from making two pages with one digest: they find accidents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from kvledger.storage.kv.layout import BlockLayout, PageSegment
from kvledger.storage.kv.pool import HostPool

__all__ = ["PageDigests"]

_WORD_BYTES = 8
_BLOCKS_AT_ONCE = 128
"""So that what is worked on stays small beside the KV cache."""
_PLACE, _FIRST, _SECOND = (
    number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""Odd multipliers of SplitMix64 (Steele, Lea and Flood 2014), as torch's signed integers."""


class PageDigests:
    """Of the blocks of a layout, and of the slots of a pool."""

    def __init__(self, layout: BlockLayout, pool: HostPool | None = None) -> None:
        self._layout = layout
        self._pool = pool
        self._sizes = [segment.num_bytes for layer in layout.layers for segment in layer.segments]

    def of_blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        """One int64 for each block, on the device where the pages are. Reads behind what was begun on its stream."""
        device = self._layout.device
        return _concatenated(
            (_digested(self._pages(torch.tensor(ids, device=device)), len(ids), device) for ids in _batches(block_ids)),
            device,
        )

    def of_slots(self, slots: Sequence[int]) -> torch.Tensor:
        """One int64 for each slot of the pool, on the host."""
        if self._pool is None:
            message = "these digests were made for no pool of slots; give one to PageDigests"
            raise ValueError(message)
        buffer, device = self._pool.buffer, torch.device("cpu")
        return _concatenated(
            (
                _digested(torch.split(buffer[list(ids)], self._sizes, dim=1), len(ids), device)
                for ids in _batches(slots)
            ),
            device,
        )

    def _pages(self, block_ids: torch.Tensor) -> Iterator[torch.Tensor]:
        for layer in self._layout.layers:
            for segment in layer.segments:
                yield _rows(layer.storage, layer.num_blocks, segment)[block_ids]


def _rows(storage: torch.Tensor, num_blocks: int, segment: PageSegment) -> torch.Tensor:
    """A view, uint8 [num_blocks, bytes of the run]."""
    size, stride = (num_blocks, segment.num_bytes), (segment.block_stride_bytes, 1)
    return torch.as_strided(storage, size, stride, segment.offset_bytes)


def _batches(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    return (ids[first : first + _BLOCKS_AT_ONCE] for first in range(0, len(ids), _BLOCKS_AT_ONCE))


def _concatenated(parts: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    found = list(parts)
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=device)


def _digested(runs: Iterable[torch.Tensor], num_rows: int, device: torch.device) -> torch.Tensor:
    """The sum of all words, each mixed with its place: one that is changed, or at another place, changes the sum."""
    total, place = torch.zeros(num_rows, dtype=torch.int64, device=device), 1
    for run in runs:
        padding = -run.shape[1] % _WORD_BYTES
        words = (torch.nn.functional.pad(run, (0, padding)) if padding else run.contiguous()).view(torch.int64)
        places = torch.arange(place, place + words.shape[1], device=device) * _PLACE
        total += _mixed(words + places).sum(dim=1)
        place += words.shape[1]
    return _mixed(total)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer: no two words become one. Works in place."""
    for shift, multiplier in ((30, _FIRST), (27, _SECOND)):
        words ^= (words >> shift) & ((1 << (64 - shift)) - 1)  # torch shifts the sign in
        words *= multiplier
    words ^= (words >> 31) & ((1 << 33) - 1)
    return words
