"""Which chunks a save evicts, so that there are slots for what it saves."""

from __future__ import annotations

from collections.abc import Container, Iterable

from kvledger.lifecycle.projections.pool import Pool


class Room:
    """Chunks that one save may evict, oldest first; to be asked for all of it before any of it is evicted.

    A chunk stays that a lookup promised, that a preempted request will come back for, that a load reads, or that is in
    `spare`. So does a chunk whose page another one needs, because evicting it would free nothing. Chunks that
    extensions want to keep come after all others.
    """

    def __init__(self, pool: Pool, spare: Container[bytes]) -> None:
        self._pool = pool
        self._slots_of = pool.state.committed
        self._keys = iter(pool.oldest_first())
        self._spare = spare
        self._num_left: dict[int, int] = {}
        """Slot → references that are left after the evictions so far."""
        self._passed_over: list[bytes] = []
        """Chunks whose pages others still need, oldest first. A later eviction may make them worth evicting."""
        self.num_freed = 0
        """Slots that the evictions so far free."""

    def free(self, num_slots: int) -> tuple[bytes, ...] | None:
        """Return the further chunks to evict so that `num_slots` more slots become free; None if there are too few."""
        candidates: list[bytes] = []
        num_left: dict[int, int] = {}
        num_freed = 0
        for key in self._candidates():
            candidates.append(key)
            for slot in self._slots_of[key]:
                num_left[slot] = left = (num_left[slot] if slot in num_left else self._left(slot)) - 1
                if left == 0:  # never so for NO_SLOT, which nobody references
                    num_freed += 1
            if num_freed >= num_slots:
                break
        else:
            self._passed_over = candidates
            return None
        victims: list[bytes] = []
        passed_over: list[bytes] = []
        for key in candidates:
            frees = any(num_left[slot] == 0 for slot in self._slots_of[key])
            (victims if frees else passed_over).append(key)
        for key in victims:
            for slot in self._slots_of[key]:
                self._num_left[slot] = self._left(slot) - 1
        self._passed_over = passed_over + self._passed_over
        self.num_freed += num_freed
        return tuple(victims)

    def _left(self, slot: int) -> int:
        left = self._num_left.get(slot)
        return self._pool.slots.num_references(slot) if left is None else left

    def _candidates(self) -> Iterable[bytes]:
        while self._passed_over:
            yield self._passed_over.pop(0)
        for key in self._keys:
            slots = self._slots_of.get(key)  # a snapshot may name keys here that are not in the pool
            if slots is not None and key not in self._spare and not self._pool.is_kept(key, slots):
                yield key
