"""Which slots of the host pool are free. One slot holds one block's page over all layers.

It counts references, because several short chunks may share one page. It must not know what is in a slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NO_SLOT = -1
"""Stands among slots for a page that is not stored, because its group does not see it any more."""
_MANY = 3
"""Slots from which on it pays to take them at once."""


class HostSlots:
    """Deterministic allocation of slot numbers: freed ones first, newest first, then untouched ones."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._num_touched = 0
        self._free: list[int] = []
        self._references: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Slots that nobody references."""
        return self.num_slots - len(self._references)

    def num_references(self, slot: int) -> int:
        """Who needs the slot: chunks that lie in it, jobs that write or read it."""
        return self._references.get(slot, 0)

    def candidates(self, count: int) -> tuple[int, ...]:
        """The slots that the next save would use, fewer where fewer are free. Takes nothing."""
        slots = self._free[: -count - 1 : -1]
        if len(slots) == count:
            return tuple(slots)
        missing = count - len(slots)
        slots.extend(range(self._num_touched, min(self._num_touched + missing, self.num_slots)))
        return tuple(slots)

    def acquire(self, slots: Sequence[int]) -> None:
        """Add a reference to each slot, but for those that are `NO_SLOT`."""
        references = self._references
        if len(slots) >= _MANY and self.candidates(len(slots)) == slots:  # at once, if they are those that come next
            self._num_touched += max(0, len(slots) - len(self._free))
            del self._free[-len(slots) :]
            references.update(dict.fromkeys(slots, 1))
            return
        for slot in slots:
            if slot in references:
                references[slot] += 1
                continue
            if slot == NO_SLOT:
                continue
            references[slot] = 1
            if slot >= self._num_touched:
                self._free.extend(range(slot - 1, self._num_touched - 1, -1))
                self._num_touched = slot + 1
            elif self._free and self._free[-1] == slot:
                self._free.pop()
            else:
                self._free.remove(slot)

    def release(self, slots: Iterable[int]) -> None:
        """Drop a reference from each slot; the last one frees it."""
        references = self._references
        for slot in slots:
            left = references.get(slot, 0) - 1
            if left > 0:
                references[slot] = left
            elif left == 0:
                del references[slot]
                self._free.append(slot)

    def snapshot(self) -> object:
        """Plain values, equal for equal states."""
        return {"free": self.num_free, "references": dict(sorted(self._references.items()))}
