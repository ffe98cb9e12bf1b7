"""How many distinct blocks the requests hold. Blocks with a common prefix stand in several tables and count once.

It counts along instead of asking the block table, which would have to be read as a whole each time.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvledger.lifecycle import events as e


class HeldBlocks:
    """Fed with each event and the life it concerns."""

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}
        self._taken: dict[int, list[int]] = {}
        """Tables of requests that finished in this moment: perhaps they are held on to."""
        self._references: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._references)

    def take(self, event: e.Event, ordinal: int | None) -> None:
        """Take up an event. `ordinal` is that of the request's life, None where there is none."""
        if isinstance(event, e.StepScheduled):
            self._taken.clear()
            for extended, block_ids in event.extended:
                if extended in self._tables:
                    self._tables[extended].extend(block_ids)
                    self._refer(block_ids)
        elif ordinal is not None:
            self._take_of(event, ordinal)

    def _take_of(self, event: e.Event, ordinal: int) -> None:
        match event:
            case e.BlocksAllocated() | e.BlockTableObserved():
                self._replace(ordinal, event.block_ids)
            case e.RequestFinished():
                self._taken[ordinal] = self._tables.get(ordinal, [])
                self._replace(ordinal, ())
            case e.BlocksHeld():
                self._replace(ordinal, self._taken.pop(ordinal, ()))
            case e.LookupRequested() | e.RequestPreempted() | e.RequestArrived() | e.RequestReleased():
                self._replace(ordinal, ())
            case _:
                pass

    def _replace(self, ordinal: int, block_ids: Iterable[int]) -> None:
        table = list(block_ids)
        self._refer(table)
        references = self._references
        for block_id in self._tables.pop(ordinal, ()):
            left = references[block_id] - 1
            if left:
                references[block_id] = left
            else:
                del references[block_id]
        if table:
            self._tables[ordinal] = table

    def _refer(self, block_ids: Iterable[int]) -> None:
        references = self._references
        for block_id in block_ids:
            references[block_id] = references.get(block_id, 0) + 1
