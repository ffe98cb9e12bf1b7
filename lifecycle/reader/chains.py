"""Numbered lists of chunk keys. After a state is restored, prefixes that shared a list share one again.

A prefix is identified by its list object and not by the keys in the list: when keys of a life become invalid, the life
gets another list. See `records.Prefix`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvledger.lifecycle.reader.records import NEVER, NO_PREFIX, Prefix


class StoredPrefix(msgspec.Struct, array_like=True, frozen=True):
    """A prefix whose keys are in a numbered list."""

    ordinal: int
    chain: int
    """Number of the list; `NEVER` if the prefix belongs to no life."""
    num_chunks: int


class Chains:
    """The key lists of one state. They are numbered at the capture, and found by number when the state is restored."""

    def __init__(self, chains: list[list[bytes]] | None = None) -> None:
        self.chains: list[list[bytes]] = [] if chains is None else chains
        self._numbers: dict[int, int] = {}
        self._kept: list[Sequence[bytes]] = []
        """Keeps each list alive, so that no other list gets its address."""

    def number_of(self, keys: Sequence[bytes]) -> int:
        """Return the number of this list object. An equal list has another number."""
        number = self._numbers.get(id(keys))
        if number is None:
            number = self._numbers[id(keys)] = len(self.chains)
            self.chains.append(list(keys))
            self._kept.append(keys)
        return number

    def stored(self, prefix: Prefix) -> StoredPrefix:
        """Return the prefix in its stored form, which has the number of its key list."""
        if prefix.ordinal == NEVER:
            return StoredPrefix(NEVER, NEVER, 0)
        return StoredPrefix(prefix.ordinal, self.number_of(prefix.keys), prefix.num_chunks)

    def prefix(self, stored: StoredPrefix) -> Prefix:
        """Return the prefix that was stored. Raises IndexError if its list of keys is missing."""
        if stored.ordinal == NEVER:
            return NO_PREFIX
        keys = self.chains[stored.chain]
        return Prefix(stored.ordinal, keys, max(0, min(stored.num_chunks, len(keys))))
