"""Which slots of the host pool are free. One slot holds one block's page over all layers.

It counts references, because several short chunks may share one page. It must not know what is in a slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kvledger.lifecycle.windows import NO_SLOT

_MANY = 4
"""Slots from which on it pays to ask whether they are those that come next."""


class State(msgspec.Struct, forbid_unknown_fields=True):
    """Which slots are taken, and which come next."""

    num_touched: int = 0
    free: list[int] = []
    failed: list[int] = []
    references: dict[int, int] = {}


class HostSlots:
    """Deterministic allocation of slot numbers: freed ones first, newest first, then untouched ones.

    Last come those whose save failed, the one that failed longest ago first: where the slot is to blame, the next save
    would fail as well.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.state = State()

    @property
    def num_free(self) -> int:
        """Slots that nobody references."""
        return self.num_slots - len(self.state.references)

    def num_references(self, slot: int) -> int:
        """Who needs the slot: chunks that lie in it, jobs that write or read it."""
        return self.state.references.get(slot, 0)

    def candidates(self, count: int) -> tuple[int, ...]:
        """The slots that the next save would use, fewer where fewer are free. Takes nothing."""
        free = self.state.free
        if count == 1 and free:  # most saves are of one page
            return (free[-1],)
        slots = free[: -count - 1 : -1]
        slots.extend(range(self.state.num_touched, min(self.state.num_touched + count - len(slots), self.num_slots)))
        slots.extend(self.state.failed[: count - len(slots)])
        return tuple(slots)

    def acquire(self, slots: Sequence[int]) -> None:
        """Add a reference to each slot, but for those that are `NO_SLOT`."""
        references, free = self.state.references, self.state.free
        num_slots = len(slots)
        if num_slots >= _MANY and self.candidates(num_slots) == slots:  # the next ones, which nobody references
            num_more = max(0, num_slots - len(free))
            num_untouched = min(num_more, self.num_slots - self.state.num_touched)
            del free[-num_slots:]
            self.state.num_touched += num_untouched
            del self.state.failed[: num_more - num_untouched]
            for slot in slots:
                references[slot] = 1
            return
        for slot in slots:
            if slot in references:
                references[slot] += 1
            elif slot != NO_SLOT:
                references[slot] = 1
                if free and free[-1] == slot:
                    free.pop()
                elif slot == self.state.num_touched:
                    self.state.num_touched = slot + 1
                elif slot < self.state.num_touched:
                    (self.state.failed if slot in self.state.failed else free).remove(slot)
                else:
                    free.extend(range(slot - 1, self.state.num_touched - 1, -1))
                    self.state.num_touched = slot + 1

    def release(self, slots: Iterable[int], *, failed: bool = False) -> None:
        """Drop a reference from each slot; the last one frees it. `failed`: it was held for a save that failed."""
        references = self.state.references
        for slot in slots:
            count = references.get(slot, 0)
            if count == 1:
                del references[slot]
                (self.state.failed if failed else self.state.free).append(slot)
            elif count:
                references[slot] = count - 1
