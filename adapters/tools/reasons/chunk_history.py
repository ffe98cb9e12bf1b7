"""What became of each chunk key: known, being saved, saved, evicted. The latest event says it, and which came before.

It follows keys through the events of all requests that bring them. Memory is bounded by the slots of the pool, and by
`MAX_GONE` for chunks that are gone and for those of a recorded connector. It must not know lookups.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from itertools import islice

import msgspec

from kvledger.lifecycle.reader import Life

MAX_GONE = 131_072
"""Chunks that are neither saved nor being saved and are still remembered. There may be an eighth more, because it costs
as much to find one that is to be forgotten as many.
"""


class ChunkStatus(enum.StrEnum):
    """What the latest event made of a chunk."""

    KNOWN = "known"
    """A request brought its key; no save was issued."""
    SAVING = "saving"
    DECLINED = "declined"
    SAVE_FAILED = "save_failed"
    SAVED = "saved"
    OFFERED = "offered"
    """A recorded connector offered it. Only kvledger's own logs say when a chunk is there to be offered."""
    EVICTED = "evicted"
    TAINTED = "tainted"
    RESET = "reset"


class ChunkFact(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The latest event of a chunk."""

    status: ChunkStatus
    sequence: int
    request_id: str = ""
    """Who brought, saved or evicted it; of an eviction, for whose save."""
    ordinal: int = -1
    """Which life of the request, where that matters."""
    job_id: int = 0
    detail: str = ""
    """Error or reason, as recorded."""
    cause: int = 0
    """The observation that the event was decided upon; it has the time."""
    earlier: ChunkFact | None = None
    """What the chunk was before, where that is part of the history."""

    def after(self, earlier: ChunkFact | None) -> ChunkFact:
        """The same with what came before it."""
        return self if earlier is self.earlier else msgspec.structs.replace(self, earlier=earlier)

    def settled(self, status: ChunkStatus, sequence: int, cause: int, detail: str = "") -> ChunkFact:
        """What became of this save."""
        earlier = None if status is ChunkStatus.SAVED else self.earlier
        return ChunkFact(status, sequence, self.request_id, self.ordinal, self.job_id, detail, cause, earlier)


AT_REST = frozenset({ChunkStatus.SAVED, ChunkStatus.OFFERED})
_IN_POOL = AT_REST | {ChunkStatus.SAVING}
_STORY = frozenset({ChunkStatus.SAVED, ChunkStatus.EVICTED, ChunkStatus.TAINTED, ChunkStatus.RESET})


class State(msgspec.Struct, forbid_unknown_fields=True):
    """All that is remembered."""

    in_pool: dict[bytes, ChunkFact] = {}
    gone: dict[bytes, ChunkFact] = {}
    """The one that was touched last comes last."""
    has_forgotten: bool = False
    """Whether any of `gone` were forgotten for want of room since events were lost."""
    before_reset: dict[bytes, int] = {}
    """Chunk in the pool, or on its way there, when vLLM reset its prefix cache alone -> the last such reset."""
    loaded_since: dict[bytes, int] = {}
    """Such a chunk that was loaded since vLLM's last reset, so that its prefix cache may have it -> that reset."""


class ChunkHistory:
    """Key -> fact."""

    def __init__(self, state: State | None = None, max_gone: int = MAX_GONE) -> None:
        self._max_gone = max_gone
        self._state = State() if state is None else state

    def get(self, key: bytes) -> ChunkFact | None:
        """The latest fact about a chunk, or None if nothing is known about it."""
        return self._state.in_pool.get(key) or self._state.gone.get(key)

    def known(self, keys: Iterable[bytes], sequence: int, request_id: str, ordinal: int) -> None:
        """A request brings keys; whoever was first is remembered."""
        for key in keys:
            if self.get(key) is None:
                self._put(key, ChunkFact(ChunkStatus.KNOWN, sequence, request_id, ordinal))

    def forget_known(self, keys: Iterable[bytes], request_id: str) -> None:
        """The request that brought these keys ends without having computed their chunks."""
        for key in keys:
            fact = self._state.gone.get(key)
            if fact is not None and fact.status is ChunkStatus.KNOWN and fact.request_id == request_id:
                del self._state.gone[key]

    def known_again(self, keys: Iterable[bytes], since: int, sequence: int, life: Life) -> None:
        """A request has computed these chunks anew: those that nobody saved were known only before event `since`."""
        for key in keys:
            fact = self._state.gone.get(key)
            if fact is not None and fact.status is ChunkStatus.KNOWN and fact.sequence < since:
                self._put(key, ChunkFact(ChunkStatus.KNOWN, sequence, life.request_id, life.ordinal))

    def offered(self, keys: Iterable[bytes], fact: ChunkFact) -> None:
        """A recorded connector offers these chunks."""
        for key in keys:
            before = self.get(key)
            if before is None or before.status is not ChunkStatus.OFFERED:
                self._put(key, fact)

    def forget_oldest(self) -> None:
        """Remember no more chunks in the pool than gone ones. A recorded connector does not say when it evicts."""
        in_pool = self._state.in_pool
        if len(in_pool) > self._max_gone * 9 // 8:
            self._state.has_forgotten = True
            for forgotten in tuple(islice(in_pool, len(in_pool) - self._max_gone)):
                del in_pool[forgotten]
                self._state.before_reset.pop(forgotten, None)
                self._state.loaded_since.pop(forgotten, None)

    def save_issued(self, keys: Iterable[bytes], fact: ChunkFact) -> None:
        """A save of these chunks starts; `fact` is noted for each."""
        for key in keys:
            before = self.get(key)
            if before is None or before.status not in AT_REST:  # pages of windows may be added to a chunk
                self._put(key, fact.after(_request_history(before)))
                if key in self._state.loaded_since:  # saved again from the blocks into which it was loaded
                    self._state.before_reset[key] = self._state.loaded_since[key]

    def save_settled(
        self, keys: Iterable[bytes], job_id: int, status: ChunkStatus, sequence: int, cause: int, error: str
    ) -> None:
        """The save of these chunks is done, or failed with `error`."""
        for key in keys:
            before = self.get(key)
            if before is not None and before.status is ChunkStatus.SAVING and before.job_id == job_id:
                self._put(key, before.settled(status, sequence, cause, error))

    def declined(self, keys: Iterable[bytes], num_chunks: int, fact: ChunkFact) -> None:
        """Of these chunks the first `num_chunks` that are not in the pool were not saved."""
        for key in keys:
            if num_chunks == 0:
                break
            before = self.get(key)
            if before is None or before.status not in _IN_POOL:
                num_chunks -= 1
                self._put(key, fact.after(_request_history(before)))

    def left(self, key: bytes, fact: ChunkFact) -> None:
        """A chunk was evicted or tainted."""
        before = self.get(key)
        is_saved = before is not None and before.status is ChunkStatus.SAVED
        self._put(key, fact.after(before if is_saved else None))

    def reset(self, sequence: int) -> None:
        """Everything in the pool, and on its way there, is stale."""
        self._state.loaded_since.clear()
        for key, before in tuple(self._state.in_pool.items()):
            earlier = before.after(None)
            self._put(key, ChunkFact(ChunkStatus.RESET, sequence, cause=sequence, earlier=earlier))

    def spared(self, sequence: int) -> None:
        """VLLM reset its prefix cache alone: everything in the pool, and on its way there, is from before that."""
        self._state.before_reset = dict.fromkeys(self._state.in_pool, sequence)
        self._state.loaded_since.clear()

    @property
    def is_any_from_before_reset(self) -> bool:
        """Whether any chunk in the pool has survived a reset of vLLM's prefix cache."""
        return bool(self._state.before_reset)

    @property
    def was_any_loaded_since_reset(self) -> bool:
        """Whether such a chunk was loaded since vLLM's last reset."""
        return bool(self._state.loaded_since)

    def reset_after(self, key: bytes) -> int:
        """The last reset of vLLM's prefix cache that this chunk in the pool has survived; 0 if there is none."""
        return self._state.before_reset.get(key, 0)

    def loaded(self, keys: Iterable[bytes]) -> None:
        """Chunks are loaded; other requests may find their blocks in vLLM's prefix cache."""
        before_reset = self._state.before_reset
        self._state.loaded_since.update((key, before_reset[key]) for key in keys if key in before_reset)

    def reset_before_load(self, key: bytes) -> int:
        """The last reset that this chunk survived in the pool before it was loaded; 0 if there is none."""
        return self._state.loaded_since.get(key, 0)

    @property
    def has_forgotten(self) -> bool:
        """Whether chunks that left before events were lost would be forgotten by now anyway."""
        return self._state.has_forgotten

    def forget(self) -> None:
        """Events are lost: nothing that is remembered can be relied upon."""
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
    """What of the past is worth keeping once a save was tried again: that it had been saved, and how it left."""
    if before is None or before.status in _STORY:
        return before
    return before.earlier
