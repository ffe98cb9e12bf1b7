"""Numbered lists of chunk keys, so that prefixes that share a list still share one after a state is restored.

A prefix is identified by its list, not by the keys in it, because a cut gives the life another list. See
`records.Prefix`.
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
    """The lists of one state: numbered when the state is captured, looked up when it is restored."""

    def __init__(self, chains: list[list[bytes]] | None = None) -> None:
        self.chains: list[list[bytes]] = [] if chains is None else chains
        self._numbers: dict[int, int] = {}
        self._kept: list[Sequence[bytes]] = []
        """Keeps each list alive, so that no other list gets its address."""

    def number_of(self, keys: Sequence[bytes]) -> int:
        """Return the number of this very list."""
        number = self._numbers.get(id(keys))
        if number is None:
            number = self._numbers[id(keys)] = len(self.chains)
            self.chains.append(list(keys))
            self._kept.append(keys)
        return number

    def stored(self, prefix: Prefix) -> StoredPrefix:
        """Return the prefix as it is stored."""
        if prefix.ordinal == NEVER:
            return StoredPrefix(NEVER, NEVER, 0)
        return StoredPrefix(prefix.ordinal, self.number_of(prefix.keys), prefix.num_chunks)

    def prefix(self, stored: StoredPrefix) -> Prefix:
        """Return the prefix that was stored. Raises IndexError if its list is missing."""
        if stored.ordinal == NEVER:
            return NO_PREFIX
        keys = self.chains[stored.chain]
        return Prefix(stored.ordinal, keys, max(0, min(stored.num_chunks, len(keys))))
