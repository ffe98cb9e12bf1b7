"""64-bit digests of slots and of blocks. The digest of a block covers its bytes in all layers of the layout.

A block and the slot that it was copied to have equal digests. Digests of blocks are computed on the device, and only
the digests leave the device. Reordered bytes change a digest. Digests detect accidental changes, but not attacks,
because they are not collision-resistant.
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
"""Blocks per batch. It is small, so that the working memory is small compared to the KV cache."""
_PLACE, _FIRST, _SECOND = (
    number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
"""Odd multipliers of SplitMix64 (Steele, Lea and Flood 2014), as torch's signed integers."""


class PageDigests:
    """Computes digests of the blocks of a layout and of the slots of a pool."""

    def __init__(self, layout: BlockLayout, pool: HostPool | None = None) -> None:
        self._pool = pool
        self._rows = layout.rows()
        self._sizes = [rows.shape[1] for rows in self._rows]
        places = torch.arange(1, -(-max(self._sizes, default=0) // _WORD.itemsize) + 1)
        self._weights = _mixed(places * _PLACE) | 1
        self._weights_of_blocks = self._weights.to(layout.device)

    def of_blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return one int64 per block, on the blocks' device. Earlier work on the current stream runs first."""
        return _digested(self._rows, block_ids, self._weights_of_blocks)

    def of_slots(self, slots: Sequence[int]) -> torch.Tensor:
        """Return one int64 per slot, computed on the host.

        Raises:
            ValueError: The object was created without a pool.
        """
        if self._pool is None:
            message = "these digests have no pool of slots; pass a pool to PageDigests"
            raise ValueError(message)
        return _digested(torch.split(self._pool.buffer, self._sizes, dim=1), slots, self._weights)


def _digested(runs: Sequence[torch.Tensor], ids: Sequence[int], weights: torch.Tensor) -> torch.Tensor:
    """Return the digests of the rows `ids`. Each tensor of `runs` has a part of every row.

    Each word of a part is mixed with an odd weight that depends on the word's place. The mixed words are added up. If
    one word changes, the sum changes. If two words are swapped, the sum changes, too, except for one pair of places in
    2^32. A row's digest mixes the sums of its parts in the order of `runs`.
    """
    parts = []
    for first in range(0, len(ids), _BLOCKS_AT_ONCE):
        rows = torch.tensor(ids[first : first + _BLOCKS_AT_ONCE], device=weights.device)
        total = torch.zeros(len(rows), dtype=torch.int64, device=weights.device)
        for run in runs:
            words = _words(run.index_select(0, rows))
            of_places = weights[: words.shape[1]]
            words *= of_places
            words ^= (words >> 32) & _LOW_HALF  # otherwise a word's highest bit would be lost
            words *= of_places
            total = _mixed(total + words.sum(dim=1))
        parts.append(total)
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=weights.device)


def _words(rows: torch.Tensor) -> torch.Tensor:
    padding = -rows.shape[1] % _WORD.itemsize
    return (torch.nn.functional.pad(rows, (0, padding)) if padding else rows).view(_WORD)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Apply the finalizer of SplitMix64 to `words`, in place. It maps different words to different words."""
    for shift, multiplier in ((30, _FIRST), (27, _SECOND)):
        words ^= (words >> shift) & ((1 << (64 - shift)) - 1)  # the mask removes the sign bits that torch shifts in
        words *= multiplier
    words ^= (words >> 31) & ((1 << 33) - 1)
    return words
