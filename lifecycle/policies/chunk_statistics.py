"""Chunk statistics: how many different chunks were asked for, and how often each came back.

What LMCache calls `ChunkStatisticsLookupClient`. It counts a chunk once per request that brings its key,
not once per poll: a lookup changes nothing, also not a statistic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.chunk_keys import ChunkKeys
from kvledger.lifecycle.projections.tracker import RequestRecord

if TYPE_CHECKING:
    from kvledger.lifecycle.policies import LookupPolicy

MAX_KEYS = 1_000_000
"""Keys that are counted one by one; beyond, only the number of further chunks is kept."""


class ChunkStatistics:
    """Wraps a policy, lets its answers through, and counts keys."""

    def __init__(self, inner: LookupPolicy, chunk_keys: ChunkKeys, chunk_size: int) -> None:
        self._inner = inner
        self._chunk_keys = chunk_keys
        self._chunk_size = chunk_size
        self._num_requests_with: Counter[bytes] = Counter()
        self.num_chunks = 0
        self.num_tokens_reusable = 0

    @property
    def num_unique_chunks(self) -> int:
        """Different keys seen."""
        return len(self._num_requests_with)

    def num_requests_with(self, key: bytes) -> int:
        """How many requests brought this key."""
        return self._num_requests_with[key]

    def usable_tokens(self, num_hit_tokens: int, record: RequestRecord) -> int:
        """What the wrapped policy allows."""
        return self._inner.usable_tokens(num_hit_tokens, record)

    def folds(self) -> Mapping[type[e.Event], Callable[..., None]]:
        """The wrapped policy's folds and the counting of observed keys."""
        folds = dict(self._inner.folds())
        inner = folds.get(e.ChunkKeysObserved)

        def count_too(event: e.ChunkKeysObserved, sequence: int) -> None:
            if inner is not None:
                inner(event, sequence)
            self._count(event)

        folds[e.ChunkKeysObserved] = count_too
        return folds

    def snapshot(self) -> object:
        """Plain values, equal for equal states."""
        return {
            "inner": self._inner.snapshot(),
            "num_chunks": self.num_chunks,
            "num_unique_chunks": self.num_unique_chunks,
            "num_tokens_reusable": self.num_tokens_reusable,
        }

    def _count(self, event: e.ChunkKeysObserved) -> None:
        for key in event.keys:
            self.num_chunks += 1
            if key in self._num_requests_with:
                self.num_tokens_reusable += self._chunk_size
                self._num_requests_with[key] += 1
            elif len(self._num_requests_with) < MAX_KEYS:
                self._num_requests_with[key] = 1
