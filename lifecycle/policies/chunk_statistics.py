"""Chunk statistics: how many different chunks were asked for, and how often each came back.

What LMCache calls `ChunkStatisticsLookupClient`. It counts a chunk once per request that brings its key,
not once per poll: a lookup changes nothing, also not a statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.tracker import RequestRecord, RequestTracker

if TYPE_CHECKING:
    from kvledger.lifecycle.policies import LookupPolicy

MAX_KEYS = 1_000_000
"""Keys that are counted one by one; beyond, only the number of further chunks is kept."""


class State(msgspec.Struct, forbid_unknown_fields=True):
    """What was counted."""

    num_requests_with: dict[bytes, int] = {}
    num_counted: dict[int, int] = {}
    """Ordinal of a life -> its chunks that have been counted."""
    num_chunks: int = 0
    num_tokens_reusable: int = 0


class ChunkStatistics:
    """Wraps a policy, lets its answers through, and counts keys.

    To be folded before the tracker, which forgets lives.
    """

    def __init__(self, inner: LookupPolicy, tracker: RequestTracker, chunk_size: int) -> None:
        self._inner = inner
        self._tracker = tracker
        self._chunk_size = chunk_size
        self.state = State()

    @property
    def num_chunks(self) -> int:
        """Chunks counted."""
        return self.state.num_chunks

    @property
    def num_tokens_reusable(self) -> int:
        """Tokens of chunks that had been brought before."""
        return self.state.num_tokens_reusable

    @property
    def num_unique_chunks(self) -> int:
        """Different keys seen."""
        return len(self.state.num_requests_with)

    def num_requests_with(self, key: bytes) -> int:
        """How many requests brought this key."""
        return self.state.num_requests_with.get(key, 0)

    def usable_tokens(self, num_hit_tokens: int, record: RequestRecord) -> int:
        """What the wrapped policy allows."""
        return self._inner.usable_tokens(num_hit_tokens, record)

    def folds(self) -> Mapping[type[e.Event], Callable[..., None]]:
        """The wrapped policy's folds and those of the counting."""
        folds = dict(self._inner.folds())
        own: dict[type[e.Event], Callable[..., None]] = {
            e.ChunkKeysObserved: self._count,
            e.SessionContinued: self._session_continued,
            e.RequestArrived: self._arrived,
            e.RequestReleased: self._released,
        }
        for event_class, fold in own.items():
            inner = folds.get(event_class)
            folds[event_class] = fold if inner is None else _both(inner, fold)
        return folds

    def _arrived(self, event: e.RequestArrived, _sequence: int) -> None:
        self.state.num_counted.pop(self._tracker.ordinal(event.request_id), None)

    def _released(self, event: e.RequestReleased, _sequence: int) -> None:
        if self._tracker.in_generation(event) is not None:
            self.state.num_counted.pop(event.ordinal, None)

    def _session_continued(self, event: e.SessionContinued, _sequence: int) -> None:
        # Other tokens follow from here, so other chunks.
        ordinal = self._tracker.ordinal(event.request_id)
        if ordinal in self.state.num_counted:
            kept = event.num_computed_tokens // self._chunk_size
            self.state.num_counted[ordinal] = min(self.state.num_counted[ordinal], kept)

    def _count(self, event: e.ChunkKeysObserved, _sequence: int) -> None:
        ordinal = self._tracker.ordinal(event.request_id)
        if ordinal < 0:
            return
        num_counted = self.state.num_counted.get(ordinal, 0)
        self.state.num_counted[ordinal] = max(num_counted, event.first_chunk + len(event.keys))
        for key in event.keys[max(0, num_counted - event.first_chunk) :]:
            self.state.num_chunks += 1
            if key in self.state.num_requests_with:
                self.state.num_tokens_reusable += self._chunk_size
                self.state.num_requests_with[key] += 1
            elif len(self.state.num_requests_with) < MAX_KEYS:
                self.state.num_requests_with[key] = 1


def _both(first: Callable[..., None], second: Callable[..., None]) -> Callable[..., None]:
    def fold(event: e.Event, sequence: int) -> None:
        first(event, sequence)
        second(event, sequence)

    return fold
