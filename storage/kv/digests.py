"""Digests of pages, made where they lie: 64 bits for a block over the bytes of all its layers, or for a slot.

A block and the slot that it was copied to have equal digests. Nothing but the digests leaves the device. Equal bytes in
another order have another digest, but nobody is kept from making two pages with one digest: they find accidents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvledger.storage.kv.layout import BlockLayout
from kvledger.storage.kv.pool import HostPool

__all__ = ["PageDigests"]

_WORD = torch.int64
_LOW_HALF = (1 << 32) - 1
_BLOCKS_AT_ONCE = 128
"""So that what is worked on stays small next to the KV cache."""
_PLACE, _FIRST, _SECOND = (
    number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""Odd multipliers of SplitMix64 (Steele, Lea and Flood 2014), as torch's signed integers."""


class PageDigests:
    """Of the blocks of a layout, and of the slots of a pool."""

    def __init__(self, layout: BlockLayout, pool: HostPool | None = None) -> None:
        self._pool = pool
        self._rows = layout.rows()
        self._sizes = [rows.shape[1] for rows in self._rows]
        places = torch.arange(1, -(-max(self._sizes, default=0) // _WORD.itemsize) + 1)
        self._weights = _mixed(places * _PLACE) | 1
        self._weights_of_blocks = self._weights.to(layout.device)

    def of_blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        """One int64 for each block, on the device where the pages are. Reads behind what was begun on its stream."""
        return _digested(self._rows, block_ids, self._weights_of_blocks)

    def of_slots(self, slots: Sequence[int]) -> torch.Tensor:
        """One int64 for each slot of the pool, on the host."""
        if self._pool is None:
            message = "these digests were made for no pool of slots; give one to PageDigests"
            raise ValueError(message)
        return _digested(torch.split(self._pool.buffer, self._sizes, dim=1), slots, self._weights)


def _digested(runs: Sequence[torch.Tensor], ids: Sequence[int], weights: torch.Tensor) -> torch.Tensor:
    """Of these rows of all runs.

    A run is the sum of its words, each mixed with an odd number that its place decides: another word makes another sum,
    and so do two that change places, but for one pair of places in 2^32. Runs are mixed one after the other.
    """
    parts = []
    for first in range(0, len(ids), _BLOCKS_AT_ONCE):
        rows = torch.tensor(ids[first : first + _BLOCKS_AT_ONCE], device=weights.device)
        total = torch.zeros(len(rows), dtype=torch.int64, device=weights.device)
        for run in runs:
            words = _words(run.index_select(0, rows))
            of_places = weights[: words.shape[1]]
            words *= of_places
            words ^= (words >> 32) & _LOW_HALF  # else a word's highest bit would be lost among others
            words *= of_places
            total = _mixed(total + words.sum(dim=1))
        parts.append(total)
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=weights.device)


def _words(rows: torch.Tensor) -> torch.Tensor:
    padding = -rows.shape[1] % _WORD.itemsize
    return (torch.nn.functional.pad(rows, (0, padding)) if padding else rows).view(_WORD)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer: no two words become one. Works in place."""
    for shift, multiplier in ((30, _FIRST), (27, _SECOND)):
        words ^= (words >> shift) & ((1 << (64 - shift)) - 1)  # torch shifts the sign in
        words *= multiplier
    words ^= (words >> 31) & ((1 << 33) - 1)
    return words
