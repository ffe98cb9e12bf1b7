"""Which slots of the host pool are free. One slot holds one block's page over all layers.

It counts references, because several short chunks may share one page. It must not know what is in a slot.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import msgspec

from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.projections.base import Projection
from kvledger.lifecycle.ranges import Count, NumSlots

_MANY = 4
"""Slots from which on it pays to ask whether they are those that come next."""


class State(msgspec.Struct, forbid_unknown_fields=True):
    """Which slots are taken, and which come next."""

    num_touched: NumSlots = 0
    """One more than the largest slot that was ever taken."""
    skipped: list[tuple[NumSlots, NumSlots]] = []
    """(First, end) of slots below `num_touched` that were never taken, ascending."""
    free: list[NumSlots] = []
    failed: list[NumSlots] = []
    references: dict[NumSlots, Count] = {}

    def check(self, num_slots: int) -> None:
        """Check that each slot below `num_touched` is in exactly one place, and no other slot in any.

        Raises:
            ValueError: it is not so.
        """
        free, references = {*self.free, *self.failed}, self.references
        num_skipped, last_end, is_ascending = 0, 0, True
        for first, end in self.skipped:
            is_ascending = is_ascending and last_end <= first < end
            num_skipped, last_end = num_skipped + end - first, end
        num_listed = len(free) + len(references)
        is_whole = (
            len(free) == len(self.free) + len(self.failed)
            and references.keys().isdisjoint(free)
            and num_listed + num_skipped == self.num_touched <= num_slots
            and max(last_end - 1, *free, max(references, default=-1)) < self.num_touched
        )
        is_both = self.skipped and any(_run_of(self.skipped, slot) is not None for slot in (*free, *references))
        if not is_whole or not is_ascending or is_both:
            raise ValueError("a slot of the host pool is in two places or in none")


def _run_of(skipped: Sequence[tuple[int, int]], slot: int) -> int | None:
    """Where the run with that slot is; None where none has it."""
    place = bisect_right(skipped, slot, key=lambda run: run[0]) - 1
    return None if place < 0 or slot >= skipped[place][1] else place


class HostSlots(Projection):
    """Deterministic allocation of slot numbers: freed ones first, newest first, then untouched ones, ascending.

    Last come those whose save failed, the one that failed longest ago first: where the slot is to blame, the next save
    would fail as well.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.state = State()

    def check(self) -> None:
        """Each slot is in one place."""
        self.state.check(self.num_slots)

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
        for first, end in (*self.state.skipped, (self.state.num_touched, self.num_slots)):
            slots.extend(range(first, min(first + count - len(slots), end)))
        slots.extend(self.state.failed[: count - len(slots)])
        return tuple(slots)

    def acquire(self, slots: Sequence[int]) -> None:
        """Add a reference to each slot, but for those that are `NO_SLOT`."""
        references, free = self.state.references, self.state.free
        num_slots = len(slots)
        # The next ones, which nobody references.
        if num_slots >= _MANY and not self.state.skipped and self.candidates(num_slots) == slots:
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
                elif slot > self.state.num_touched:  # a log may name any slot: nothing is made for those before it
                    self.state.skipped.append((self.state.num_touched, slot))
                    self.state.num_touched = slot + 1
                elif not self._take_skipped(slot):
                    (self.state.failed if slot in self.state.failed else free).remove(slot)

    def _take_skipped(self, slot: int) -> bool:
        skipped = self.state.skipped
        place = _run_of(skipped, slot)
        if place is None:
            return False
        first, end = skipped[place]
        skipped[place : place + 1] = [run for run in ((first, slot), (slot + 1, end)) if run[0] < run[1]]
        return True

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
