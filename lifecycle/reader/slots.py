"""What each slot of the host pool is needed for: chunks that lie in it, copies that write or read it, tails.

It counts, and does not know what is in a slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvledger.lifecycle.events import NO_SLOT


class Slots:
    """Slot -> how many need it. One that nobody needs is free."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._num_holders: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Slots that nobody needs."""
        return self.num_slots - len(self._num_holders)

    def num_holders(self, slot: int) -> int:
        """How many need it."""
        return self._num_holders.get(slot, 0)

    def hold(self, slots: Iterable[int]) -> None:
        """One more needs each of these, but for those that are `NO_SLOT`."""
        for slot in slots:
            if slot != NO_SLOT:
                self._num_holders[slot] = self._num_holders.get(slot, 0) + 1

    def hold_for_writing(self, slots: Sequence[int]) -> list[int]:
        """The same; returns those that somebody needed already, also where one stands twice, or that there are not."""
        self.hold(slots)
        return [slot for slot in slots if self._num_holders.get(slot, 1) > 1 or not NO_SLOT <= slot < self.num_slots]

    def stored(self) -> dict[int, int]:
        """Slot → how many need it."""
        return dict(self._num_holders)

    def resume(self, stored: Mapping[int, int]) -> None:
        """Know what was stored, and nothing else."""
        self._num_holders = dict(stored)

    def lost(self) -> None:
        """Events are missing here: what the slots are needed for is not known."""
        self._num_holders.clear()

    def release(self, slots: Iterable[int]) -> None:
        """One less needs each of these."""
        for slot in slots:
            left = self._num_holders.pop(slot, 0) - 1
            if left > 0:
                self._num_holders[slot] = left
