"""The latest fact about each chunk key (known, being saved, saved, evicted, …), and earlier facts about the key.

The slots of the pool limit the number of saved chunks. `MAX_GONE` limits the number of chunks that are gone, and of
chunks of a recorded connector. This module must not depend on lookups.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from itertools import islice

import msgspec

from kvledger.lifecycle.reader import Life

MAX_GONE = 131_072
"""Number of chunks to remember although they are neither saved nor being saved. Up to an eighth more are kept, because
removing many costs as much as removing one."""


class ChunkStatus(enum.StrEnum):
    """State of a chunk after its latest event."""

    KNOWN = "known"
    """A request has the chunk's key; no save was issued."""
    SAVING = "saving"
    DECLINED = "declined"
    SAVE_FAILED = "save_failed"
    SAVED = "saved"
    OFFERED = "offered"
    """A recorded connector offered the chunk. The log does not record when the chunk became available."""
    EVICTED = "evicted"
    TAINTED = "tainted"
    RESET = "reset"


class ChunkFact(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one event says about a chunk: its status after the event, and who or what caused it."""

    status: ChunkStatus
    sequence: int
    request_id: str = ""
    """Request that had the key first, whose save the fact is about, or that was offered the chunk. For an eviction, the
    request that needed the slots."""
    ordinal: int = -1
    """Ordinal of the request's life; -1: not known."""
    job_id: int = 0
    detail: str = ""
    """Error or reason, as recorded."""
    cause: int = 0
    """Sequence number of the observation that caused the event. The observation's time is also the event's time."""
    earlier: ChunkFact | None = None
    """Earlier fact about the chunk, if the chunk's history keeps it."""

    def after(self, earlier: ChunkFact | None) -> ChunkFact:
        """Return this fact with `earlier` as the earlier fact about the chunk."""
        return self if earlier is self.earlier else msgspec.structs.replace(self, earlier=earlier)

    def settled(self, status: ChunkStatus, sequence: int, cause: int, detail: str = "") -> ChunkFact:
        """Return the fact that replaces this fact when the save of the chunk has completed or failed."""
        earlier = None if status is ChunkStatus.SAVED else self.earlier
        return ChunkFact(status, sequence, self.request_id, self.ordinal, self.job_id, detail, cause, earlier)


AT_REST = frozenset({ChunkStatus.SAVED, ChunkStatus.OFFERED})
_IN_POOL = AT_REST | {ChunkStatus.SAVING}
_STORY = frozenset({ChunkStatus.SAVED, ChunkStatus.EVICTED, ChunkStatus.TAINTED, ChunkStatus.RESET})


class State(msgspec.Struct, forbid_unknown_fields=True):
    """State of a chunk history."""

    in_pool: dict[bytes, ChunkFact] = {}
    gone: dict[bytes, ChunkFact] = {}
    """Key → fact about a chunk that is not in the pool, the most recently changed last."""
    has_forgotten: bool = False
    """Whether facts were dropped, for lack of room, after the last gap in the log."""
    before_reset: dict[bytes, int] = {}
    """Key of a chunk → sequence number of the last reset of only vLLM's own prefix cache. Contains the chunks that were
    saved, or being saved, at this reset."""
    loaded_since: dict[bytes, int] = {}
    """Key of a chunk → sequence number of the same reset. Contains the chunks of `before_reset` that were loaded later,
    so that vLLM's prefix cache may have them."""


class ChunkHistory:
    """Key of a chunk → the latest fact about that chunk."""

    def __init__(self, state: State | None = None, max_gone: int = MAX_GONE) -> None:
        self._max_gone = max_gone
        self._state = State() if state is None else state

    def get(self, key: bytes) -> ChunkFact | None:
        """Return the latest fact about a chunk; None if nothing is known."""
        return self._state.in_pool.get(key) or self._state.gone.get(key)

    def known(self, keys: Iterable[bytes], sequence: int, request_id: str, ordinal: int) -> None:
        """Record the keys of a request. Keys about which there is a fact keep this fact."""
        for key in keys:
            if self.get(key) is None:
                self._put(key, ChunkFact(ChunkStatus.KNOWN, sequence, request_id, ordinal))

    def forget_known(self, keys: Iterable[bytes], request_id: str) -> None:
        """Forget keys that this request had first. It finished before it computed the chunks with these keys."""
        for key in keys:
            fact = self._state.gone.get(key)
            if fact is not None and fact.status is ChunkStatus.KNOWN and fact.request_id == request_id:
                del self._state.gone[key]

    def known_again(self, keys: Iterable[bytes], since: int, sequence: int, life: Life) -> None:
        """Record that a life has computed these chunks.

        This replaces only facts with the status `KNOWN` that are older than the event `since`.
        """
        for key in keys:
            fact = self._state.gone.get(key)
            if fact is not None and fact.status is ChunkStatus.KNOWN and fact.sequence < since:
                self._put(key, ChunkFact(ChunkStatus.KNOWN, sequence, life.request_id, life.ordinal))

    def offered(self, keys: Iterable[bytes], fact: ChunkFact) -> None:
        """Record that a recorded connector offers these chunks."""
        for key in keys:
            before = self.get(key)
            if before is None or before.status is not ChunkStatus.OFFERED:
                self._put(key, fact)

    def forget_oldest(self) -> None:
        """Forget the oldest chunks in the pool if there are too many. A recorded connector reports no evictions."""
        in_pool = self._state.in_pool
        if len(in_pool) > self._max_gone * 9 // 8:
            self._state.has_forgotten = True
            for forgotten in tuple(islice(in_pool, len(in_pool) - self._max_gone)):
                del in_pool[forgotten]
                self._state.before_reset.pop(forgotten, None)
                self._state.loaded_since.pop(forgotten, None)

    def save_issued(self, keys: Iterable[bytes], fact: ChunkFact) -> None:
        """Record `fact` for each chunk whose save begins."""
        for key in keys:
            before = self.get(key)
            if before is None or before.status not in AT_REST:  # a save may add pages of windows to a saved chunk
                self._put(key, fact.after(_request_history(before)))
                if key in self._state.loaded_since:  # saved again from the blocks into which it was loaded
                    self._state.before_reset[key] = self._state.loaded_since[key]

    def save_settled(
        self, keys: Iterable[bytes], job_id: int, status: ChunkStatus, sequence: int, cause: int, error: str
    ) -> None:
        """Record that the save of these chunks completed, or failed with `error`."""
        for key in keys:
            before = self.get(key)
            if before is not None and before.status is ChunkStatus.SAVING and before.job_id == job_id:
                self._put(key, before.settled(status, sequence, cause, error))

    def declined(self, keys: Iterable[bytes], num_chunks: int, fact: ChunkFact) -> None:
        """Record that some chunks were not saved: the first `num_chunks` that are neither saved nor being saved."""
        for key in keys:
            if num_chunks == 0:
                break
            before = self.get(key)
            if before is None or before.status not in _IN_POOL:
                num_chunks -= 1
                self._put(key, fact.after(_request_history(before)))

    def left(self, key: bytes, fact: ChunkFact) -> None:
        """Record that a chunk was evicted or tainted."""
        before = self.get(key)
        is_saved = before is not None and before.status is ChunkStatus.SAVED
        self._put(key, fact.after(before if is_saved else None))

    def reset(self, sequence: int) -> None:
        """Record a cache reset: chunks in the pool and chunks being saved are stale."""
        self._state.loaded_since.clear()
        for key, before in tuple(self._state.in_pool.items()):
            earlier = before.after(None)
            self._put(key, ChunkFact(ChunkStatus.RESET, sequence, cause=sequence, earlier=earlier))

    def spared(self, sequence: int) -> None:
        """Record a reset of only vLLM's prefix cache. Chunks in the pool and chunks being saved survive this reset."""
        self._state.before_reset = dict.fromkeys(self._state.in_pool, sequence)
        self._state.loaded_since.clear()

    @property
    def is_any_from_before_reset(self) -> bool:
        """Whether any chunk in the pool has survived a reset of vLLM's prefix cache."""
        return bool(self._state.before_reset)

    @property
    def was_any_loaded_since_reset(self) -> bool:
        """Whether any chunk that survived vLLM's last reset was loaded after the reset."""
        return bool(self._state.loaded_since)

    def reset_after(self, key: bytes) -> int:
        """Return the sequence number of the last reset of only vLLM's prefix cache since this chunk was computed.

        0 if there was no such reset, or if the chunk has left the pool.
        """
        return self._state.before_reset.get(key, 0)

    def loaded(self, keys: Iterable[bytes]) -> None:
        """Record that chunks are loaded, so that other requests may find them in vLLM's prefix cache."""
        before_reset = self._state.before_reset
        self._state.loaded_since.update((key, before_reset[key]) for key in keys if key in before_reset)

    def reset_before_load(self, key: bytes) -> int:
        """Return the sequence number of the last reset if this chunk survived it and was loaded later; otherwise 0."""
        return self._state.loaded_since.get(key, 0)

    @property
    def has_forgotten(self) -> bool:
        """Whether facts were dropped, for lack of room, after the last gap in the log.

        If so, a fact from before the gap would have been dropped, too, because the oldest facts are dropped first.
        """
        return self._state.has_forgotten

    def forget(self) -> None:
        """Forget everything, because events are missing."""
        self._state.has_forgotten = False
        self._state.in_pool.clear()
        self._state.gone.clear()
        self._state.before_reset.clear()
        self._state.loaded_since.clear()

    def _put(self, key: bytes, fact: ChunkFact) -> None:
        in_pool, gone = self._state.in_pool, self._state.gone
        gone.pop(key, None)
        if fact.status in _IN_POOL:
            in_pool[key] = fact
            return
        in_pool.pop(key, None)
        self._state.before_reset.pop(key, None)
        gone[key] = fact
        if len(gone) > self._max_gone * 9 // 8:
            self._state.has_forgotten = True
            for forgotten in tuple(islice(gone, len(gone) - self._max_gone)):
                del gone[forgotten]


def _request_history(before: ChunkFact | None) -> ChunkFact | None:
    """Return the latest fact that says that the chunk was saved, evicted, tainted or reset; None: no such fact."""
    if before is None or before.status in _STORY:
        return before
    return before.earlier
