"""The chunk keys of each request, as far as its tokens are known.

A key is a hash over a chunk and everything before it (with salt, adapter and media in it), made by the
adapter. This module stores keys; it does not know how they are made or whether anything is saved under them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections import Projection
from kvledger.lifecycle.projections.tracker import RequestTracker
from kvledger.lifecycle.ranges import LifeOrdinal


class State(msgspec.Struct, forbid_unknown_fields=True):
    """By the ordinal of a life."""

    keys: dict[LifeOrdinal, list[bytes]] = {}


class ChunkKeys(Projection):
    """Life of a request -> keys in chunk order. To be folded before the tracker, which forgets lives."""

    def __init__(self, tracker: RequestTracker, chunk_size: int) -> None:
        self._tracker = tracker
        self._chunk_size = chunk_size
        self.state = State()

    def __len__(self) -> int:
        return len(self.state.keys)

    def of(self, request_id: str) -> Sequence[bytes]:
        """Those known so far of the present life of an id."""
        return self.state.keys.get(self._tracker.ordinal(request_id), ())

    def of_life(self, ordinal: int) -> Sequence[bytes]:
        """Those known so far of that life."""
        return self.state.keys.get(ordinal, ())

    def first(self, ordinal: int, num_chunks: int) -> list[bytes]:
        """A list of the first keys of a life, the caller's own."""
        keys = self.state.keys.get(ordinal)
        return [] if keys is None else keys[:num_chunks]

    def of_chunks(self, ordinal: int, chunks: tuple[int, ...]) -> tuple[bytes, ...]:
        """The keys of these chunks of a life, without those that are not known."""
        keys = self.state.keys.get(ordinal)
        if keys is None:
            return ()
        num_keys = len(keys)
        if len(chunks) == 1:  # as with most saves
            return (keys[chunks[0]],) if chunks[0] < num_keys else ()
        return tuple([keys[chunk] for chunk in chunks if chunk < num_keys])

    @on(e.ChunkKeysObserved)
    def _observed(self, event: e.ChunkKeysObserved, _sequence: int) -> None:
        ordinal = self._tracker.ordinal(event.request_id)
        if ordinal < 0:
            return
        keys = self.state.keys.setdefault(ordinal, [])
        num_keys = len(keys)
        if event.first_chunk == num_keys:
            keys.extend(event.keys)
        elif event.first_chunk < num_keys:  # behind a gap, keys would come to stand for other chunks
            keys[event.first_chunk :] = event.keys

    @on(e.SessionContinued)
    def _session_continued(self, event: e.SessionContinued, _sequence: int) -> None:
        # Other tokens follow from here, so other keys.
        keys = self.state.keys.get(self._tracker.ordinal(event.request_id), [])
        del keys[event.num_computed_tokens // self._chunk_size :]

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived, _sequence: int) -> None:
        self.state.keys.pop(self._tracker.ordinal(event.request_id), None)

    @on(e.RequestReleased)
    def _released(self, event: e.RequestReleased, _sequence: int) -> None:
        if self._tracker.in_generation(event) is not None:
            self.state.keys.pop(event.ordinal, None)
