"""Which chunks to evict for one save.

A save of many chunks asks for more room with each of them. The walk over the pool goes on where it stopped, so the
whole save costs one walk. It must not know whose save it is.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence


class Room:
    """Chunks that may be evicted, oldest first. Nothing may be evicted in the pool while this is asked."""

    def __init__(
        self,
        oldest_first: Iterable[bytes],
        slots_of: Mapping[bytes, Sequence[int]],
        num_references: Callable[[int], int],
        is_kept: Callable[[bytes, Sequence[int]], bool],
        spare: Container[bytes],
    ) -> None:
        self._keys = iter(oldest_first)
        self._slots_of = slots_of
        self._num_references = num_references
        self._is_kept = is_kept
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
        return self._num_references(slot) if left is None else left

    def _candidates(self) -> Iterable[bytes]:
        while self._passed_over:
            yield self._passed_over.pop(0)
        for key in self._keys:
            slots = self._slots_of.get(key)  # a snapshot may name keys here that are not in the pool
            if slots is not None and key not in self._spare and not self._is_kept(key, slots):
                yield key
