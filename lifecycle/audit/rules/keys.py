"""Keys: what one stands for, and what a reset makes of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.forgotten import LIFE
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.states import BlocksRegion, RequestState

MAX_KEYS = 1 << 16
"""Keys that are remembered; the oldest are forgotten first."""


class _Known(msgspec.Struct, frozen=True, gc=False):
    """Keys of chunks in a row, none of them twice."""

    first_chunk: int
    parent: bytes
    """The key of the chunk before the first one; empty where there is none."""
    keys: tuple[bytes, ...]
    sequence: int

    def is_at(self, chunk: int, key: bytes, parent: bytes) -> bool:
        """Whether the key was recorded as this chunk's, behind this one."""
        keys, number = self.keys, chunk - self.first_chunk
        if not 0 <= number < len(keys) or keys[number] != key:
            return False
        return parent == (keys[number - 1] if number else self.parent)

    def num_in_common(self, chunk: int, keys: tuple[bytes, ...]) -> int:
        """How many of the keys, the first one being that of this chunk, were recorded here one after the other."""
        count = 0
        for known, key in zip(self.keys[chunk - self.first_chunk :], keys, strict=False):
            if known != key:
                break
            count += 1
        return count

    def place_of(self, key: bytes) -> tuple[int, bytes]:
        """Number of the key's chunk, key of the chunk before it."""
        number = self.keys.index(key)
        return self.first_chunk + number, self.keys[number - 1] if number else self.parent


class KeyIdentity(Checker):
    """KEY_IDENTITY: a chunk key stands for one prefix, and so for one place in it.

    The same key never names chunks at two places, or behind two different chunks.

    Verifies: this for the last 65536 keys of the log, over all requests; and that keys of a request come without a gap.
    Does not verify: that a key covers everything else its KV depends on, such as salt, adapter, media and weights:
    tokens never enter the log, only keys made from them.
    """

    rule = "KEY_IDENTITY"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._known = _Remembered()

    @on(e.ChunkKeysObserved)
    def _observed(self, event: e.ChunkKeysObserved) -> None:
        """Compare each key's place with where it was before."""
        first_chunk, keys, parent = event.first_chunk, event.keys, b""
        if first_chunk:
            if self.moment.life is None:
                return
            known = self.moment.life.keys
            if first_chunk > len(known):
                detail = f"keys of chunks from {first_chunk} on, but {len(known)} are known: what do they follow?"
                self.broken(detail)
                return
            parent = known[first_chunk - 1]
        if not self._known.add_new(_Known(first_chunk, parent, keys, self.moment.sequence)):
            self._check_places(first_chunk, parent, keys)

    def _check_places(self, chunk: int, parent: bytes, keys: tuple[bytes, ...]) -> None:
        """Piece by piece: some were named before, mostly the beginning of a prompt that others share."""
        while keys and not self._known.add_new(_Known(chunk, parent, keys, self.moment.sequence)):
            known = self._known.of(keys[0])
            if known is None:  # one behind it is known, or stands twice
                self._known.add_new(_Known(chunk, parent, keys[:1], self.moment.sequence))
                num_done = 1
            elif known.is_at(chunk, keys[0], parent):
                num_done = known.num_in_common(chunk, keys)
            else:
                before = known.place_of(keys[0])
                prefix = "behind another prefix" if parent != before[1] else "behind the same chunk"
                detail = f"key {keys[0].hex()} names chunk {chunk}, {prefix}; it had named chunk {before[0]}"
                self.broken(detail, known.sequence)
                return
            parent = keys[num_done - 1]
            chunk += num_done
            keys = keys[num_done:]


class _Remembered:
    """Key -> what recorded it first, for the last keys."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Known] = {}
        # The dict knows the order too, but is slow at telling which key is its oldest.
        self._keys: deque[bytes] = deque()
        self.of: Callable[[bytes], _Known | None] = self._known.get

    def add_new(self, known: _Known) -> bool:
        """Remember these keys if all of them are new; whether that is so, or they are recorded as these."""
        keys = known.keys
        if not keys:
            return True
        before = self._known.get(keys[0])
        if before is not None:
            return before.first_chunk == known.first_chunk and before.parent == known.parent and before.keys == keys
        if len(keys) == 1:  # nearly always
            self._known[keys[0]] = known
            self._keys.append(keys[0])
        else:
            num_before = len(self._known)
            if not self._known.keys().isdisjoint(keys):
                return False
            for key in keys:
                self._known[key] = known
            if len(self._known) < num_before + len(keys):  # one of them stands twice
                for key in set(keys):
                    del self._known[key]
                return False
            self._keys.extend(keys)
        while len(self._known) > MAX_KEYS:
            del self._known[self._keys.popleft()]
        return True


_PREEMPTED = RequestState.PREEMPTED


class ResetEpoch(Checker):
    """RESET_EPOCH: what was cached before a reset is never offered again.

    After a reset the cache is empty, and only saves issued since then fill it.

    Verifies: every chunk of an answered hit was committed since the last reset, by a save that was issued since, and so
    was the tail it ends with; of what a request had computed at a reset nothing is saved until it begins anew, also not
    by a session's next turn.
    Does not verify: what survives a reset and is never offered; the local prefix cache of the engine; loads that were
    in flight during the reset.
    """

    rule = "RESET_EPOCH"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._reset_at = 0
        self._stale: dict[str, None] = {}
        """Requests that have held blocks since before the last reset, or lost them since."""
        self._seen: dict[str, tuple[int, int, bytes]] = {}
        """Request id -> (removals counted by the chunk index then, chunks found good, key of the last of them).

        A key hashes all before it, so an equal last key means equal keys: this spares the polls.
        """
        model.forgotten.at(LIFE, self._seen, self._stale)
        self._chunk_size = model.configuration.chunk_size

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        if self.jobs.epoch and event.num_hit_tokens:
            self._check_hit(event)

    @on(e.SaveIssued, e.TailSaveIssued)
    def _issued(self, event: e.SaveIssued | e.TailSaveIssued) -> None:
        if event.request_id in self._stale:
            detail = f"save {event.job_id} copies what was computed on top of KV from before the reset"
            self.broken(detail, self._reset_at, event.cause)

    @on(e.LookupRequested)
    def _begins_anew(self, event: e.LookupRequested) -> None:
        self._stale.pop(event.request_id, None)

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        if self.moment.state_before is _PREEMPTED:
            self._stale.pop(event.request_id, None)

    @on(e.TokensRolledBack)
    def _rolled_back(self, event: e.TokensRolledBack) -> None:
        if not event.num_computed_tokens:
            self._stale.pop(event.request_id, None)

    @on(e.CacheReset)
    def _begin_epoch(self, _event: e.CacheReset) -> None:
        self._reset_at = self.moment.sequence
        self._seen.clear()
        self._stale.clear()
        self._stale.update((life.request_id, None) for life in self.lives if life.blocks is not BlocksRegion.NONE)

    def _check_hit(self, event: e.LookupAnswered) -> None:
        num_chunks, of_tail = divmod(event.num_hit_tokens, self._chunk_size)
        tail = self.tails.saved(self.moment.life)
        if of_tail and (tail is None or tail.end_token != event.num_hit_tokens):
            detail = f"the hit of {event.num_hit_tokens} tokens counts a tail of {of_tail}, not saved since the reset"
            self.broken(detail, self._reset_at, event.cause)
            return
        num_removed = self.chunks.num_removed
        keys = [] if self.moment.life is None else self.moment.life.keys
        removed_then, num_seen, last_key = self._seen.get(event.request_id, (num_removed, 0, b""))
        is_as_seen = removed_then == num_removed and 0 < num_seen <= len(keys) and keys[num_seen - 1] == last_key
        first = num_seen if is_as_seen else 0
        for chunk, key in enumerate(keys[first:num_chunks], first):
            if key not in self.chunks and not self._left_since(key):
                detail = f"the hit of {event.num_hit_tokens} tokens counts chunk {chunk}, not saved since the reset"
                self.broken(detail, self._reset_at, event.cause)
                return
        if 0 < num_chunks <= len(keys):
            self._seen[event.request_id] = (num_removed, num_chunks, keys[num_chunks - 1])

    def _left_since(self, key: bytes) -> bool:
        """Whether the chunk was evicted or tainted after the reset; a load of it is LOADABLE_AFTER_COMMIT's."""
        departed = self.chunks.departed(key)
        return departed is not None and departed.sequence > self._reset_at
