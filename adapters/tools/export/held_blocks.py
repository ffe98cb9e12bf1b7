"""Counts the distinct blocks that requests hold. The count is updated one block table at a time, to save time."""

from __future__ import annotations

from array import array
from collections import Counter

from kvledger.lifecycle.reader import Model


class HeldBlocks:
    """The distinct blocks in the block tables of all lives. A shared block is in several tables and counts once.

    Args:
        model: contains the block tables.
        kept: ordinal of a finished life → blocks that are held for that life's copies until it is released.
    """

    def __init__(self, model: Model, kept: dict[int, list[int]]) -> None:
        self._model = model
        self._kept = kept
        self._tables: dict[int, array[int]] = {}
        self._references: Counter[int] = Counter()
        for life in model.lives:
            self.look(life.ordinal)

    def __len__(self) -> int:
        return len(self._references)

    def look(self, ordinal: int) -> None:
        """Update the count to the present block table of a life."""
        table = array("I", self._kept.get(ordinal) or self._model.tables.of(ordinal))
        before = self._tables.pop(ordinal, array("I"))
        num_kept = len(before) if table[: len(before)] == before else 0  # usually the table has only grown
        self._references.update(table[num_kept:])
        for block_id in before[num_kept:]:
            self._references[block_id] -= 1
            if not self._references[block_id]:
                del self._references[block_id]
        if table:
            self._tables[ordinal] = table

    def keep(self, ordinal: int) -> None:
        """Record that a life has finished, and that its blocks are held for its copies."""
        life = self._model.lives.of(ordinal)
        if life is not None:
            self._kept[ordinal] = list(self._model.tables.lost_by(life))
            self.look(ordinal)

    def forget(self, ordinal: int) -> None:
        """Record that a life has been released."""
        self._kept.pop(ordinal, None)
        self.look(ordinal)
