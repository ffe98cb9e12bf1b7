"""Keys: which prefix a key names, and what a reset does to it."""

from __future__ import annotations

from collections import OrderedDict

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model import AuditModel
from kvledger.lifecycle.marks import on

MAX_KEYS = 1 << 16
"""Number of keys that are remembered; the oldest are forgotten first."""
_PREFIX_BYTES = 4
"""Bytes of each hash in `ChunkKeysObserved.hash_prefixes`."""


class KeyIdentity(Checker):
    """KEY_IDENTITY: a chunk key names one prefix, and so one position.

    The same key never names chunks at two positions, after two different chunks, or with two different vLLM hashes of
    their last block.

    Verifies: this for the last 65536 keys of the log, over all requests. The keys of a request have no gap. A key is
    vLLM's hash of the chunk's last block, cut to 16 bytes, if chunks are whole blocks and the request has no adapter,
    no given embeddings and is no pooling request; otherwise it is not that hash. The log has the first 4 bytes of
    vLLM's hash, which are read separately from the key.
    Does not verify: that a key covers everything else that the KV depends on, such as salt, adapter, media and weights:
    the log has keys made from tokens, not the tokens. A key that is not vLLM's hash, such as that of a chunk smaller
    than a block, is compared only with equal keys, and not by the tokens after the last whole block. A key for which
    the log has no hash of vLLM is not compared with one.
    """

    rule = "KEY_IDENTITY"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._known: OrderedDict[bytes, tuple[int, bytes, bytes, int]] = OrderedDict()
        """Key → its chunk number, the key of the chunk before it (empty: none), the first bytes of vLLM's hash of its
        last block (empty: not known), and the event that recorded it first."""

    @on(e.ChunkKeysObserved)
    def _observed(self, event: e.ChunkKeysObserved) -> None:
        """Compare the position of each key with its earlier one."""
        parent = b""
        if event.first_chunk:
            if self.moment.life is None:
                return
            known = self.moment.life.keys
            if event.first_chunk > len(known):
                detail = f"keys of chunks from {event.first_chunk} on, but chunk {len(known)} has no key"
                self.broken(detail)
                return
            parent = known[event.first_chunk - 1]
        prefixes = _prefixes(event)
        if len(prefixes) != len(event.keys):
            self.broken(f"{len(event.keys)} keys, but {len(prefixes)} block hashes to check them with")
            return
        for chunk, (key, prefix) in enumerate(zip(event.keys, prefixes, strict=True), event.first_chunk):
            named = (chunk, parent, prefix, self.moment.sequence)
            known_chunk, known_parent, known_prefix, known_at = self._known.setdefault(key, named)
            wrong = _wrong_hash(event, key, prefix, known_prefix)
            if wrong:
                self.broken(f"key {key.hex()} of chunk {chunk} {wrong}", known_at)
                break
            if known_chunk != chunk or known_parent != parent:
                after = "after another prefix" if parent != known_parent else "after the same chunk"
                detail = f"key {key.hex()} names chunk {chunk}, {after}; it named chunk {known_chunk} before"
                self.broken(detail, known_at)
                break
            parent = key
        while len(self._known) > MAX_KEYS:
            self._known.popitem(last=False)


def _prefixes(event: e.ChunkKeysObserved) -> list[bytes]:
    """Return the first bytes of vLLM's hash of each chunk's last block; empty if not known."""
    if not event.hash_prefixes:
        return [b""] * len(event.keys)
    firsts = range(0, len(event.hash_prefixes), _PREFIX_BYTES)
    found = [event.hash_prefixes[first : first + _PREFIX_BYTES] for first in firsts]
    return [prefix if any(prefix) else b"" for prefix in found]


def _wrong_hash(event: e.ChunkKeysObserved, key: bytes, prefix: bytes, known_prefix: bytes) -> str:
    """Return what contradicts vLLM's hash of the chunk's last block; empty if nothing does."""
    if not prefix:
        return ""
    if known_prefix and prefix != known_prefix:
        return f"names a chunk whose last block has hash {prefix.hex()}…; before, it had {known_prefix.hex()}…"
    if event.are_block_hashes and not key.startswith(prefix):
        return f"is not vLLM's hash of the chunk's last block, {prefix.hex()}…"
    if not event.are_block_hashes and key.startswith(prefix):
        return "is vLLM's hash of the chunk's last block, which leaves out what the chunk's KV depends on"
    return ""


class ResetEpoch(Checker):
    """RESET_EPOCH: nothing that was cached before a reset is offered after it.

    Verifies: every chunk of an answered hit, and the tail at its end, was committed since the last reset by a save
    issued since then. Nothing that a request had computed at a reset is saved until the request begins anew. A
    session's next turn is no new beginning.
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
            detail = f"save {event.job_id} copies what was computed on top of KV from before the reset"
            self.broken(detail, self._reset_at, event.cause)

    @on(e.CacheReset)
    def _begin_epoch(self, _event: e.CacheReset) -> None:
        self._reset_at = self.moment.sequence

    def _check_hit(self, event: e.LookupAnswered) -> None:
        num_chunks, of_tail = divmod(event.num_hit_tokens, self.layout.chunk_size)
        tail = self.tails.saved(self.moment.life)
        if of_tail and (tail is None or tail.end_token != event.num_hit_tokens):
            detail = f"the hit of {event.num_hit_tokens} tokens counts a tail of {of_tail}, not saved since the reset"
            self.broken(detail, self._reset_at, event.cause)
            return
        life = self.moment.life
        if life is None or self.chunks.num_committed(life) >= num_chunks:
            return
        for chunk, key in enumerate(life.keys[:num_chunks]):
            if key not in self.chunks and not self._left_since(key):
                detail = f"the hit of {event.num_hit_tokens} tokens counts chunk {chunk}, not saved since the reset"
                self.broken(detail, self._reset_at, event.cause)
                return

    def _left_since(self, key: bytes) -> bool:
        """Whether the chunk was evicted or tainted after the reset. LOADABLE_AFTER_COMMIT reports a load of it."""
        departed = self.chunks.departed(key)
        return departed is not None and departed.sequence > self._reset_at
