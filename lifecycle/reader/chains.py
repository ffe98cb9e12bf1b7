"""Lists of chunk keys, numbered: so that what points into the same list before a state is stored does so afterwards.

A prefix of a life is told apart by the list that it is part of, not by the keys in it, because a cut gives the life
another list. See `records.Prefix`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvledger.lifecycle.reader.records import NEVER, NO_PREFIX, Prefix


class StoredPrefix(msgspec.Struct, array_like=True, frozen=True):
    """A prefix whose keys stand in a numbered list."""

    ordinal: int
    chain: int
    """Number of the list; `NEVER` for the prefix of no life."""
    num_chunks: int


class Chains:
    """The lists of one state: numbered while it is captured, found again while it is resumed."""

    def __init__(self, chains: list[list[bytes]] | None = None) -> None:
        self.chains: list[list[bytes]] = [] if chains is None else chains
        self._numbers: dict[int, int] = {}
        self._kept: list[Sequence[bytes]] = []
        """While a list is here, no other one gets its address."""

    def number_of(self, keys: Sequence[bytes]) -> int:
        """The number of this very list."""
        number = self._numbers.get(id(keys))
        if number is None:
            number = self._numbers[id(keys)] = len(self.chains)
            self.chains.append(list(keys))
            self._kept.append(keys)
        return number

    def stored(self, prefix: Prefix) -> StoredPrefix:
        """The prefix as it is stored."""
        if prefix.ordinal == NEVER:
            return StoredPrefix(NEVER, NEVER, 0)
        return StoredPrefix(prefix.ordinal, self.number_of(prefix.keys), prefix.num_chunks)

    def prefix(self, stored: StoredPrefix) -> Prefix:
        """The prefix that was stored. Raises IndexError where its list is missing."""
        if stored.ordinal == NEVER:
            return NO_PREFIX
        keys = self.chains[stored.chain]
        return Prefix(stored.ordinal, keys, max(0, min(stored.num_chunks, len(keys))))
