"""Unfilled blocks. Their contents are wrong: a load into them failed, or they were computed on top of such blocks.

A block is filled again when it is allocated again. It is also filled when it is written from its first position on and
all blocks before it are filled.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvledger.lifecycle.events import NULL_BLOCK
from kvledger.lifecycle.ranges import BlockId, Count, Int64, JobId

if TYPE_CHECKING:
    from kvledger.lifecycle.events import StepScheduled
    from kvledger.lifecycle.geometry import Geometry
    from kvledger.lifecycle.projections.request_record import RequestRecord

    Records = Mapping[int, RequestRecord]
    """Ordinal → record."""


class UnfilledBlocks(msgspec.Struct, forbid_unknown_fields=True):
    """The unfilled blocks, as a part of the tracker's state that the tracker updates.

    Usually no block is unfilled, so test `blocks` before you ask about many blocks.
    """

    blocks: dict[Int64, None] = {}
    """Ids of the unfilled blocks."""
    loads: dict[JobId, tuple[tuple[BlockId, ...], bool]] = {}
    """Job id of a load in flight → (its blocks, whether it is asynchronous)."""
    lost: list[array] = []  # type: ignore[type-arg]  # in Python 3.11 it takes no argument when it runs
    """Block tables that requests lost since the last step. If a load of that step fails, their blocks are added, too.
    The arrays never change."""
    lost_before_step: list[array] = []  # type: ignore[type-arg]
    """Block tables that requests lost between the last two steps. With two steps in flight, vLLM schedules the second
    step before it knows whether a load of the first step failed."""
    num_failures: Count = 0
    """Number of times that blocks were added."""

    def spoil(self, block_ids: Iterable[int]) -> bool:
        """Whether one of these blocks is unfilled."""
        return not self.blocks.keys().isdisjoint(block_ids)

    def add(self, block_ids: Sequence[int], records: Records) -> None:
        """Add these blocks, and all later blocks of each table with one of them: they were computed on top of it."""
        failed = dict.fromkeys(block_ids)
        held = (record.block_ids or () for record in records.values())
        for table in (*held, *self.lost, *self.lost_before_step):
            self.blocks.update(dict.fromkeys(table[_first_of(failed, table) :]))
        self.mark(block_ids)

    def mark(self, block_ids: Iterable[int]) -> None:
        """Add only these blocks."""
        self.blocks.update(dict.fromkeys(block_ids))
        self.fill((NULL_BLOCK,))
        self.num_failures += 1

    def fill(self, block_ids: Iterable[int]) -> None:
        """Remove blocks that were allocated again, or written."""
        for block_id in block_ids:
            self.blocks.pop(block_id, None)

    def step(self, event: StepScheduled, records: Records, geometry: Geometry) -> None:
        """Update the blocks that a step writes. The tables must already contain the blocks that the step adds."""
        for ordinal, num_computed_tokens, num_scheduled_tokens, _ in event.advanced:
            first = geometry.pages_spanning(0, num_computed_tokens).stop
            end = geometry.pages_spanning(num_computed_tokens, num_scheduled_tokens).stop
            self._written(_table_of(ordinal, records), num_computed_tokens, first, end, geometry)
        for ordinal, block_ids in event.extended:  # decoding requests have no row in `advanced`
            table = _table_of(ordinal, records)
            first = len(table) - len(block_ids)
            num_computed_tokens = first // geometry.windows.num_groups * geometry.block_size
            self._written(table, num_computed_tokens, first, len(table), geometry)

    def _written(
        self, table: Sequence[int], num_computed_tokens: int, first: int, end: int, geometry: Geometry
    ) -> None:
        """Mark blocks of pages [first, end) as filled, or as unfilled if their tokens see an earlier unfilled block."""
        windows = geometry.windows
        if windows.has_any:
            # A log may count more tokens than it has blocks.
            num_blocks = min(first // windows.num_groups, len(table) // windows.num_groups + 1)
            seen = windows.pages_seen(num_computed_tokens, range(num_blocks))
            unfilled = first if self.spoil(table[page] for page in seen if page < len(table)) else end
        else:
            unfilled = _first_of(self.blocks, table[:first])
            unfilled = unfilled if unfilled < first else end
        if unfilled < end:
            self.blocks.update(dict.fromkeys(table[unfilled:end]))
            self.fill((NULL_BLOCK,))
        else:
            self.fill(table[first:end])


def _table_of(ordinal: int, records: Records) -> Sequence[int]:
    record = records.get(ordinal)
    return () if record is None else record.block_ids or ()


def _first_of(block_ids: Container[int], table: Sequence[int]) -> int:
    """Return the index of the first of these blocks in the table; the table's length if it has none of them."""
    return next((place for place, block_id in enumerate(table) if block_id in block_ids), len(table))
