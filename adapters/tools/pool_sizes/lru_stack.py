"""The order in which chunks were last used. It shows how large a pool must be to still have a chunk.

One pass is enough for pools of every size, because an LRU pool has all chunks that a smaller LRU pool has (R. L.
Mattson and others, "Evaluation techniques for storage hierarchies", 1970). To limit memory, only a sample of the chunks
is kept, chosen by a hash of their keys (C. Waldspurger and others, "Efficient MRC construction with SHARDS", FAST
2015).

This module must not depend on events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple
from zlib import crc32

MAX_KEYS = 65_536
"""Default limit of kept keys: about 12 MB."""
_MAX_MASK = (1 << 24) - 1
"""Largest mask. If it still leaves too many keys in the sample, someone chose keys with equal hashes."""
_MIN_TREE = 1024


class Run(NamedTuple):
    """Consecutive keys of a prefix that have the same last use."""

    num_above: int
    """Number of kept keys that were used later than all keys of the run."""
    num_keys: int


class LruStack:
    """Kept keys in the order of their last use.

    A use concerns all keys of a prefix: they become the youngest keys. The first key of the prefix is the youngest of
    all, as in kvledger's pool. Keys with the same last use are neighbours in the order, so all of them get the same
    number.

    Args:
        capacity: number of chunks in the largest pool of interest. Chunks that this pool would have evicted are
            forgotten.
        max_keys: limit of kept keys.
    """

    def __init__(self, capacity: int, max_keys: int = MAX_KEYS) -> None:
        self._capacity = capacity
        self._max_keys = max_keys
        self.mask = 0
        """A key is in the sample if its hash has none of these bits. The mask grows and never shrinks."""
        self._use_of: dict[bytes, int] = {}
        """Kept key → number of its last use."""
        self._num_uses = 0
        self._tree = [0] * _MIN_TREE
        """Fenwick tree: number of a use → number of keys whose last use it was."""

    def __len__(self) -> int:
        return len(self._use_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._use_of

    @property
    def one_of(self) -> int:
        """One of this many keys is kept."""
        return self.mask + 1

    def kept_places(self, keys: Sequence[bytes]) -> Sequence[int]:
        """Return the positions in `keys` of the keys that are in the sample."""
        mask = self.mask
        if not mask:
            return range(len(keys))
        return [place for place, hash_of_key in enumerate(map(crc32, keys)) if not hash_of_key & mask]

    def runs(self, keys: Iterable[bytes]) -> Iterator[Run]:
        """Yield the runs of a prefix's keys, up to the first key that is not kept."""
        for number, run in groupby(map(self._use_of.get, keys)):
            if number is None:
                return
            yield Run(len(self._use_of) - self._num_until(number), sum(1 for _ in run))

    def use(self, keys: Iterable[bytes], new: Iterable[bytes] = ()) -> None:
        """Record a use of a prefix: its kept keys, and the keys in `new`, become the youngest.

        Args:
            keys: the prefix's keys that are in the sample, in the order of the prefix.
            new: keys to add if they are among `keys`.
        """
        if self._num_uses + 1 == len(self._tree):
            self._renumber()
        use_of, kept = self._use_of, list(dict.fromkeys(keys))  # a log may name a key twice
        numbers = list(map(use_of.get, kept))
        if None in numbers:
            added = set(new)
            found = zip(kept, numbers, strict=True)
            kept = [key for key, number in found if number is not None or key in added]
        if not kept:
            return
        for number, run in groupby(numbers):
            if number is not None:
                self._add(number, -sum(1 for _ in run))
        self._num_uses += 1
        for key in kept:
            use_of[key] = self._num_uses
        self._add(self._num_uses, len(kept))
        if len(use_of) > self._max_keys:
            self._make_room()

    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove keys, because no pool has them any more."""
        for key in keys:
            number = self._use_of.pop(key, None)
            if number is not None:
                self._add(number, -1)

    def clear(self) -> None:
        """Remove all keys."""
        self._use_of.clear()
        self._renumber()

    # --- room ------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Forget keys that even the largest pool would have evicted. If necessary, halve the sample repeatedly."""
        self._renumber()
        while 4 * len(self._use_of) > 3 * self._max_keys:
            if self.mask >= _MAX_MASK:
                self.clear()
                return
            self.mask = 2 * self.mask + 1
            self._use_of = {key: number for key, number in self._use_of.items() if not crc32(key) & self.mask}
        self._renumber()

    def _renumber(self) -> None:
        """Number the uses again, without keys that even the largest pool would have evicted."""
        counts = Counter(self._use_of.values())
        num_above, first_kept = 0, 0
        for number in sorted(counts, reverse=True):
            if num_above * self.one_of >= self._capacity:
                first_kept = number + 1
                break
            num_above += counts[number]
        numbers = {old: new for new, old in enumerate(sorted(old for old in counts if old >= first_kept), 1)}
        self._use_of = {key: numbers[old] for key, old in self._use_of.items() if old >= first_kept}
        self._num_uses = len(numbers)
        self._tree = [0] * (2 * len(self._use_of) + _MIN_TREE)
        for old, new in numbers.items():
            self._add(new, counts[old])

    # --- the Fenwick tree ------------------------------------------------------------------------

    def _add(self, number: int, count: int) -> None:
        tree, size = self._tree, len(self._tree)
        while number < size:
            tree[number] += count
            number += number & -number

    def _num_until(self, number: int) -> int:
        """Return the number of keys whose last use has this number or a lower one."""
        tree, count = self._tree, 0
        while number:
            count += tree[number]
            number -= number & -number
        return count
