"""What each slot of the host pool is needed for: chunks that lie in it, copies that write or read it, tails.

The audit's own; see `lives.py`. It counts, and does not know what is in a slot.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvledger.lifecycle.windows import NO_SLOT


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
        holders = self._num_holders
        for slot in slots:
            if slot in holders:
                holders[slot] += 1
            elif slot != NO_SLOT:
                holders[slot] = 1

    def hold_for_writing(self, slots: Iterable[int]) -> list[int] | None:
        """The same; returns those that somebody needed already, also where one stands twice, or that there are not."""
        taken = None
        holders, num_slots = self._num_holders, self.num_slots
        for slot in slots:
            if slot in holders:
                holders[slot] += 1
                taken = [*(taken or ()), slot]
            elif slot != NO_SLOT:
                holders[slot] = 1
                if not 0 <= slot < num_slots:
                    taken = [*(taken or ()), slot]
        return taken

    def release(self, slots: Iterable[int]) -> None:
        """One less needs each of these."""
        holders = self._num_holders
        for slot in slots:
            left = holders.get(slot, 0) - 1
            if left > 0:
                holders[slot] = left
            else:
                holders.pop(slot, None)
