"""Keys: what one stands for, and what a reset makes of it."""

from __future__ import annotations

from collections import OrderedDict

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.marks import on

MAX_KEYS = 1 << 16
"""Keys that are remembered; the oldest are forgotten first."""


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
        self._known: OrderedDict[bytes, tuple[int, bytes, int]] = OrderedDict()
        """Key -> its chunk, the key of the chunk before it (empty: none), and the event that recorded it first."""

    @on(e.ChunkKeysObserved)
    def _observed(self, event: e.ChunkKeysObserved) -> None:
        """Compare each key's place with where it was before."""
        parent = b""
        if event.first_chunk:
            if self.moment.life is None:
                return
            known = self.moment.life.keys
            if event.first_chunk > len(known):
                detail = f"keys of chunks from {event.first_chunk} on, but {len(known)} are known: what do they follow?"
                self.broken(detail)
                return
            parent = known[event.first_chunk - 1]
        for chunk, key in enumerate(event.keys, event.first_chunk):
            named = (chunk, parent, self.moment.sequence)
            known_chunk, known_parent, known_at = self._known.setdefault(key, named)
            if known_chunk != chunk or known_parent != parent:
                prefix = "behind another prefix" if parent != known_parent else "behind the same chunk"
                detail = f"key {key.hex()} names chunk {chunk}, {prefix}; it had named chunk {known_chunk}"
                self.broken(detail, known_at)
                break
            parent = key
        while len(self._known) > MAX_KEYS:
            self._known.popitem(last=False)


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

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        if self.jobs.epoch and event.num_hit_tokens:
            self._check_hit(event)

    @on(e.SaveIssued, e.TailSaveIssued)
    def _issued(self, event: e.SaveIssued | e.TailSaveIssued) -> None:
        life = self.moment.life
        if life is not None and event.generation == life.stale_generation:
            detail = f"save {event.job_id} copies what was computed on top of KV from before the reset"
            self.broken(detail, self._reset_at, event.cause)

    @on(e.CacheReset)
    def _begin_epoch(self, _event: e.CacheReset) -> None:
        self._reset_at = self.moment.sequence

    def _check_hit(self, event: e.LookupAnswered) -> None:
        num_chunks, of_tail = divmod(event.num_hit_tokens, self.spans.chunk_size)
        tail = self.tails.saved(self.moment.life)
        if of_tail and (tail is None or tail.end_token != event.num_hit_tokens):
            detail = f"the hit of {event.num_hit_tokens} tokens counts a tail of {of_tail}, not saved since the reset"
            self.broken(detail, self._reset_at, event.cause)
            return
        keys = [] if self.moment.life is None else self.moment.life.keys
        for chunk, key in enumerate(keys[:num_chunks]):
            if key not in self.chunks and not self._left_since(key):
                detail = f"the hit of {event.num_hit_tokens} tokens counts chunk {chunk}, not saved since the reset"
                self.broken(detail, self._reset_at, event.cause)
                return

    def _left_since(self, key: bytes) -> bool:
        """Whether the chunk was evicted or tainted after the reset; a load of it is LOADABLE_AFTER_COMMIT's."""
        departed = self.chunks.departed(key)
        return departed is not None and departed.sequence > self._reset_at
