"""How many chunks, copies and tails need each slot of the host pool.

This module only counts, and does not know what is in a slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvledger.lifecycle.events import NO_SLOT


class Slots:
    """Slot → number of holders. A slot without holders is free."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._num_holders: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return self.num_slots - len(self._num_holders)

    def num_holders(self, slot: int) -> int:
        """Return the number of the slot's holders."""
        return self._num_holders.get(slot, 0)

    def hold(self, slots: Iterable[int]) -> None:
        """Add a holder to each of these slots, except `NO_SLOT`."""
        for slot in slots:
            if slot != NO_SLOT:
                self._num_holders[slot] = self._num_holders.get(slot, 0) + 1

    def hold_for_writing(self, slots: Sequence[int]) -> list[int]:
        """Add a holder to each of these slots. Return the slots that had a holder, occur twice, or do not exist."""
        self.hold(slots)
        return [slot for slot in slots if self._num_holders.get(slot, 1) > 1 or not NO_SLOT <= slot < self.num_slots]

    def stored(self) -> dict[int, int]:
        """Slot → number of holders."""
        return dict(self._num_holders)

    def resume(self, stored: Mapping[int, int]) -> None:
        """Restore a stored state."""
        self._num_holders = dict(stored)

    def lost(self) -> None:
        """Forget the holders, because events are missing."""
        self._num_holders.clear()

    def release(self, slots: Iterable[int]) -> None:
        """Remove a holder from each of these slots."""
        for slot in slots:
            left = self._num_holders.pop(slot, 0) - 1
            if left > 0:
                self._num_holders[slot] = left
