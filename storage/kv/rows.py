"""Memory as a table of rows, so that one torch call gathers or scatters the bytes of many blocks in all layers.

A kernel call costs as much time as the copying of many KiB. The number of calls must therefore not grow with the number
of layers or blocks. This module works with offsets and strides in bytes. It must not know blocks, slots or layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch

__all__ = ["Rows", "element_of"]

_ELEMENTS = ((16, torch.complex128), (8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
"""Element types by size in bytes. torch copies their bits unchanged. It copies 16-byte elements up to ten times as fast
as bytes."""


def element_of(*multiples: int) -> torch.dtype:
    """Return the largest element type whose size in bytes divides all of `multiples`."""
    alignment = math.gcd(*multiples)
    return next(dtype for size, dtype in _ELEMENTS if alignment % size == 0)


@attrs.frozen
class Rows:
    """A view of memory as rows of equal length, made by `over`.

    Row r of `table` begins `r * step` bytes after row 0. `over` chooses `step`. If a row is longer than `step` bytes,
    neighbouring rows overlap.
    """

    table: torch.Tensor
    first_row: torch.Tensor
    rows_per_index: torch.Tensor

    @classmethod
    def over(
        cls,
        memory: torch.Tensor,
        starts: Sequence[int],
        strides: Sequence[int],
        count: int,
        row_bytes: int,
        element: torch.dtype,
    ) -> Rows:
        """Make rows of `row_bytes` bytes that begin at byte `starts[i] + index * strides[i]` of `memory`.

        `index` is from 0 to `count - 1`. `of` returns the numbers of these rows. `table` has more rows between
        these. Use only row numbers from `of`, so that no other bytes are touched. `memory` is uint8 `[n]`.
        """
        low = min(starts)
        high = max(start + (count - 1) * stride for start, stride in zip(starts, strides, strict=True)) + row_bytes
        step = math.gcd(*(start - low for start in starts), *strides)
        elements = memory[low:high].view(element)
        return cls(
            table=elements.as_strided(
                ((high - low - row_bytes) // step + 1, row_bytes // element.itemsize),
                (step // element.itemsize, 1),
            ),
            first_row=torch.tensor([(start - low) // step for start in starts], device="cpu"),
            rows_per_index=torch.tensor([stride // step for stride in strides], device="cpu"),
        )

    def of(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the row numbers for each index, `[len(indices), len(starts)]`. An index has one row for each start."""
        return indices[:, None] * self.rows_per_index + self.first_row
