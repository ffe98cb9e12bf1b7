"""Keys: which prefix a chunk key identifies, and which chunks a reset invalidates."""

from __future__ import annotations

from collections import OrderedDict

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.marks import on

MAX_KEYS = 1 << 16
"""Maximum number of keys that are remembered. The oldest are forgotten first."""
_PREFIX_BYTES = 4
"""Bytes of each hash in `ChunkKeysObserved.hash_prefixes`."""


class KeyIdentity(Checker):
    """KEY_IDENTITY: a chunk key identifies one prefix, and therefore one position.

    The same key never belongs to chunks at two positions, to chunks that follow different chunks, or to chunks whose
    last blocks have different hashes in vLLM.

    Verifies: none of the last 65536 keys of the log identifies two prefixes. The keys of all requests are compared with
    one another. If a chunk of a request has a key, every chunk before it has a key. If chunks are whole blocks, and the
    request has no adapter and no prompt embeddings and is not a pooling request, a key is vLLM's hash of the chunk's
    last block, cut to 16 bytes. In all other cases the key differs from vLLM's hash of that block. The check uses the
    first 4 bytes of vLLM's hash, which kvledger reads separately from the key.
    Does not verify: that a key covers everything besides tokens on which the KV depends, such as salt, adapter, media
    and weights, because the log has only the keys. If a key is not vLLM's hash, for example because a chunk is smaller
    than a block, chunks with the same key are compared only up to their last whole block. A key is compared with vLLM's
    hash only if the log has that hash.
    """

    rule = "KEY_IDENTITY"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._known: OrderedDict[bytes, tuple[int, bytes, bytes, int]] = OrderedDict()
        """Key → (chunk number, key of the chunk before it, first bytes of vLLM's hash of the chunk's last block,
        sequence number of the event that first recorded the key). For chunk 0, the key of the chunk before it is empty.
        The hash is empty if it is not known."""

    @on(e.ChunkKeysObserved)
    def _observed(self, event: e.ChunkKeysObserved) -> None:
        """Compare each key's position and hash with the first position and hash recorded for the same key."""
        parent = b""
        if event.first_chunk:
            if self.moment.life is None:
                return
            known = self.moment.life.keys
            if event.first_chunk > len(known):
                detail = f"the event has keys of chunks from {event.first_chunk} on, but chunk {len(known)} has no key"
                self.broken(detail)
                return
            parent = known[event.first_chunk - 1]
        prefixes = _prefixes(event)
        if len(prefixes) != len(event.keys):
            self.broken(f"the event has {len(event.keys)} keys, but {len(prefixes)} block hashes to check them with")
            return
        for chunk, (key, prefix) in enumerate(zip(event.keys, prefixes, strict=True), event.first_chunk):
            named = (chunk, parent, prefix, self.moment.sequence)
            known_chunk, known_parent, known_prefix, known_at = self._known.setdefault(key, named)
            wrong = _wrong_hash(event, key, prefix, known_prefix)
            if wrong:
                self.broken(f"key {key.hex()} of chunk {chunk} {wrong}", known_at)
                break
            if known_chunk != chunk or known_parent != parent:
                after = "after another prefix" if parent != known_parent else "after the same prefix"
                detail = f"key {key.hex()} names chunk {chunk} {after}, but it named chunk {known_chunk} before"
                self.broken(detail, known_at)
                break
            parent = key
        while len(self._known) > MAX_KEYS:
            self._known.popitem(last=False)


def _prefixes(event: e.ChunkKeysObserved) -> list[bytes]:
    """Return the first bytes of vLLM's hash of each chunk's last block; empty for a chunk without a known hash."""
    if not event.hash_prefixes:
        return [b""] * len(event.keys)
    firsts = range(0, len(event.hash_prefixes), _PREFIX_BYTES)
    found = [event.hash_prefixes[first : first + _PREFIX_BYTES] for first in firsts]
    return [prefix if any(prefix) else b"" for prefix in found]


def _wrong_hash(event: e.ChunkKeysObserved, key: bytes, prefix: bytes, known_prefix: bytes) -> str:
    """Return, in words, how a key contradicts vLLM's hash of the chunk's last block; empty if it does not."""
    if not prefix:
        return ""
    if known_prefix and prefix != known_prefix:
        return f"names a chunk whose last block has hash {prefix.hex()}…, but the hash was {known_prefix.hex()}… before"
    if event.are_block_hashes and not key.startswith(prefix):
        return f"is not vLLM's hash of the chunk's last block, {prefix.hex()}…"
    if not event.are_block_hashes and key.startswith(prefix):
        return "is vLLM's hash of the chunk's last block, which does not cover everything on which the KV depends"
    return ""


class ResetEpoch(Checker):
    """RESET_EPOCH: nothing that was cached before a reset is offered after it.

    Verifies: every chunk of an answer's hit, and the tail at its end, was saved by a save that was both issued and
    completed after the last reset. A request that had computed tokens at the reset saves nothing until it begins anew,
    for example after a preemption. A session's next turn does not count as a new beginning.
    Does not verify: data that survives a reset and is never offered; the engine's own prefix cache; loads that were in
    flight during the reset.
    """

    rule = "RESET_EPOCH"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._reset_at = 0

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        if self.copies.epoch and event.num_hit_tokens:
            self._check_hit(event)

    @on(e.SaveIssued, e.TailSaveIssued)
    def _issued(self, event: e.SaveIssued | e.TailSaveIssued) -> None:
        life = self.moment.life
        if life is not None and event.generation == life.stale_generation:
            detail = f"save {event.job_id} copies tokens that were computed on top of KV from before the reset"
            self.broken(detail, self._reset_at, event.cause)

    @on(e.CacheReset)
    def _begin_epoch(self, _event: e.CacheReset) -> None:
        self._reset_at = self.moment.sequence

    def _check_hit(self, event: e.LookupAnswered) -> None:
        num_chunks, of_tail = divmod(event.num_hit_tokens, self.layout.chunk_size)
        tail = self.tails.saved(self.moment.life)
        if of_tail and (tail is None or tail.end_token != event.num_hit_tokens):
            detail = (
                f"the hit of {event.num_hit_tokens} tokens includes a tail of {of_tail} tokens, "
                "which was not saved since the reset"
            )
            self.broken(detail, self._reset_at, event.cause)
            return
        life = self.moment.life
        if life is None or self.chunks.num_committed(life) >= num_chunks:
            return
        for chunk, key in enumerate(life.keys[:num_chunks]):
            if key not in self.chunks and not self._left_since(key):
                detail = (
                    f"the hit of {event.num_hit_tokens} tokens includes chunk {chunk}, "
                    "which was not saved since the reset"
                )
                self.broken(detail, self._reset_at, event.cause)
                return

    def _left_since(self, key: bytes) -> bool:
        """Whether the chunk was evicted or tainted after the reset. LOADABLE_AFTER_COMMIT reports loads of it."""
        departed = self.chunks.departed(key)
        return departed is not None and departed.sequence > self._reset_at
