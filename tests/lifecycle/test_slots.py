"""Slots of the host pool: counted references, never two owners, nothing lost."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvledger.lifecycle.projections.pool import HostSlots

NUM_SLOTS = 7


class SlotsAgainstASet(RuleBasedStateMachine):
    """The real slots next to a counter; each owner takes candidates, shares what is taken, or gives back."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = HostSlots(NUM_SLOTS)
        self.model: Counter[int] = Counter()

    @rule(count=st.integers(0, NUM_SLOTS + 2))
    def take_candidates(self, count: int) -> None:
        """A save takes the offered slots; none of them may have an owner."""
        offered = self.slots.candidates(count)
        assert len(offered) == len(set(offered)) == min(count, NUM_SLOTS - len(self.model))
        assert not set(offered) & set(self.model), "a slot would get two owners"
        assert self.slots.candidates(count) == offered, "asking takes nothing"
        self.slots.acquire(offered)
        self.model.update(offered)

    @rule(slot=st.integers(0, NUM_SLOTS - 1))
    def take_any(self, slot: int) -> None:
        """A replayed log may name any slot, free or shared."""
        self.slots.acquire((slot,))
        self.model[slot] += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data(), failed=st.booleans())
    def give_back(self, data: st.DataObject, failed: bool) -> None:
        """The last reference frees the slot."""
        slot = data.draw(st.sampled_from(sorted(self.model)))
        self.slots.release((slot,), failed=failed)
        self.model -= Counter((slot,))

    @rule(slot=st.integers(0, NUM_SLOTS - 1))
    def give_back_what_nobody_has(self, slot: int) -> None:
        """It is not freed a second time."""
        if slot not in self.model:
            self.slots.release((slot,))

    @invariant()
    def every_slot_is_free_or_referenced(self) -> None:
        """And the counts agree."""
        assert self.slots.num_free == NUM_SLOTS - len(self.model)
        assert self.slots.state.references == self.model
        everything = self.slots.candidates(NUM_SLOTS)
        assert sorted(everything) == sorted(set(range(NUM_SLOTS)) - set(self.model))


TestSlotsAgainstASet = SlotsAgainstASet.TestCase


def test_freed_slots_are_used_again_before_untouched_ones_newest_first() -> None:
    """Replay must choose as the live ledger did, so the order is part of the behaviour."""
    slots = HostSlots(6)
    slots.acquire((0, 1, 2))
    slots.release((1,))
    slots.release((0,))
    assert slots.candidates(6) == (0, 1, 3, 4, 5)


def test_a_shared_slot_is_free_when_its_last_reference_is_gone() -> None:
    """Several short chunks share one page."""
    slots = HostSlots(1)
    slots.acquire((0, 0))
    slots.release((0,))
    assert (slots.num_free, slots.candidates(1)) == (0, ())
    slots.release((0,))
    assert (slots.num_free, slots.candidates(1)) == (1, (0,))


def test_slots_of_failed_saves_are_used_again_last_of_all_longest_ago_first() -> None:
    """One that nobody can write would otherwise fail every save that comes."""
    slots = HostSlots(6)
    slots.acquire((0, 1, 2, 3))
    slots.release((3,), failed=True)
    slots.release((1,), failed=True)
    slots.release((0,))
    assert slots.candidates(6) == (0, 4, 5, 3, 1)
    slots.acquire(slots.candidates(4))
    assert slots.candidates(6) == (1,)
    slots.release((3,))
    assert slots.candidates(6) == (3, 1), "it was written in the meantime"
