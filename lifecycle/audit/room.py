"""Which chunks may leave the host pool, in which order, and which have to stay.

Imagine a list of all chunks in their order of eviction. Each use moves all chunks of a prefix to the end of the list,
in reverse order: the first chunk of the prompt becomes the last chunk of the list. With such a list, each save of a
long request would move its whole prompt. `Room` therefore stores a list of uses, and the latest use of each chunk.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import attrs
import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.answers import ENDS, Answers
from kvledger.lifecycle.reader.chains import Chains, StoredPrefix
from kvledger.lifecycle.reader.chunks import Chunks
from kvledger.lifecycle.reader.copies import Copies, Settled
from kvledger.lifecycle.reader.lives import Lives
from kvledger.lifecycle.reader.moment import Moment
from kvledger.lifecycle.reader.records import Prefix


class StoredRoom(msgspec.Struct, forbid_unknown_fields=True):
    """State of `Room`, as plain values. Other fields refer to a use by its index in `uses`."""

    uses: list[tuple[StoredPrefix, int, int]]
    """(prefix, `_Use.num_taken`, `_Use.num_missing`) of each use."""
    last_uses: dict[bytes, int]
    order: list[int]
    use_of: dict[int, int]


@attrs.define(eq=False)
class _Use:
    """A use of a prefix. It is the latest use of those chunks of the prefix that no later use covers."""

    ordinal: int
    """Ordinal of the life that has the prefix."""
    keys: Sequence[bytes]
    num_chunks: int = 0
    """Number of chunks of the prefix, without the chunks at its end that are not in the pool."""
    num_taken: int = 0
    """All chunks that a later use covers are among the first `num_taken` chunks of the prefix."""
    num_missing: int = 0
    """All chunks that are not in the pool are among the first `num_missing` chunks of the prefix. Saves of other lives
    may add these chunks to the pool."""
    num_last: int = 0
    """Number of chunks in the pool that have this use as their last use."""


class Room:
    """Order in which chunks leave the pool. `Room` must fold an event after `Answers`, `Copies` and `Chunks`.

    A prefix is held by each answer that promises it, by each preempted request that waits for it, and by each copy in
    flight that reads it or adds its last chunk. When one of them stops holding the prefix, this is a use of the prefix.
    """

    def __init__(self, lives: Lives, copies: Copies, chunks: Chunks, answers: Answers, moment: Moment) -> None:
        self._lives, self._copies, self._chunks, self._answers = lives, copies, chunks, answers
        self._moment = moment
        self._chunk_size = answers.chunk_size
        self._order: OrderedDict[_Use, None] = OrderedDict()
        """Uses, least recent first. A use of held chunks is removed when found. The end of the hold adds a new use."""
        self._last_use: dict[bytes, _Use] = {}
        """Chunk in the pool → its last use."""
        self._use_of: dict[int, _Use] = {}
        """Ordinal → the life's last use, as long as that is the last use of at least one chunk."""
        self.out_of_turn: list[tuple[bytes, bytes | None]] = []
        """(key of a chunk that the last `chunks.evicted` evicted too early, key of the chunk that had to leave before
        it; None if no chunk was allowed to leave)."""

    def held(self) -> Iterator[Prefix]:
        """Yield the prefixes from which no save may evict a chunk."""
        yield from self._answers.prefixes()
        yield from self._copies.prefixes()

    def relied_on(self) -> frozenset[bytes]:
        """Return the keys of all chunks that no save may evict, because of a pending answer or a copy in flight."""
        return frozenset().union(*(prefix.key_set for prefix in self.held()))

    def own_beginning(self, ordinal: int) -> Prefix:
        """Return the chunks of this life that its own saves must not evict.

        These are its settled chunks, or all of its chunks if the number of settled tokens is not known.
        """
        life = self._lives.of(ordinal)
        if life is None:
            return Prefix.of(None, 0)
        num_settled_tokens, sequence = life.settled
        return Prefix.of(life, num_settled_tokens // self._chunk_size if sequence else len(life.keys))

    def leaving(self, ordinal: int) -> Iterator[bytes]:
        """Yield the chunks that a save of this life may evict, in the order of eviction."""
        held, own = list(self.held()), self.own_beginning(ordinal)
        self._oldest(held, own)  # removes the uses of held chunks, so that later calls skip them
        for use in self._order:
            chunk, key = self._last_chunk(use)
            while chunk >= 0 and not own.has(chunk, key) and not any(prefix.has(chunk, key) for prefix in held):
                if self._last_use.get(key) is use:
                    yield key
                chunk, key = chunk - 1, use.keys[chunk - 1]

    def stored(self, chains: Chains) -> StoredRoom:
        """Return the state."""
        numbers = {use: number for number, use in enumerate(dict.fromkeys(self._last_use.values()))}
        return StoredRoom(
            [
                (chains.stored(Prefix(use.ordinal, use.keys, use.num_chunks)), use.num_taken, use.num_missing)
                for use in numbers
            ],
            {key: numbers[use] for key, use in self._last_use.items()},
            [numbers[use] for use in self._order],
            {ordinal: numbers[use] for ordinal, use in self._use_of.items()},
        )

    def resume(self, stored: StoredRoom, chains: Chains) -> None:
        """Restore a stored state. Raises `ValueError` if it is inconsistent."""
        uses = []
        for stored_prefix, num_taken, num_missing in stored.uses:
            prefix = chains.prefix(stored_prefix)
            uses.append(_Use(prefix.ordinal, prefix.keys, prefix.num_chunks, num_taken, num_missing))
        known = [frozenset(use.keys[: use.num_chunks]) for use in uses]
        for key, number in stored.last_uses.items():
            if key not in known[number]:
                raise ValueError("the prefix of a chunk's last use does not contain the chunk")
            self._last_use[key] = uses[number]
            uses[number].num_last += 1
        if not all(uses[number].num_last for number in (*stored.order, *stored.use_of.values())):
            raise ValueError("the state lists a use of chunks, but none of them was last used then")
        self._order = OrderedDict.fromkeys(uses[number] for number in stored.order)
        self._use_of = {ordinal: uses[number] for ordinal, number in stored.use_of.items()}

    # --- uses ------------------------------------------------------------------------------------

    @on(*ENDS)
    def _no_longer_relied_on(self, _event: e.RequestEvent | e.DecisionWithheld) -> None:
        for prefix in self._answers.let_go:
            self._use(prefix)

    @on(e.RequestPreempted, e.RequestFinished)
    def _stopped(self, _event: e.RequestPreempted | e.RequestFinished) -> None:
        life = self._moment.life
        if life is not None and self._moment.is_legal:
            self._use(Prefix.of(life, len(life.keys)))

    @on(Settled)
    def _settled(self, _event: Settled) -> None:
        job = self._copies.current
        if job is not None and job.epoch == self._copies.epoch:
            self._use(job.prefix, new_from=None if job.is_load else min(job.chunks, default=None))

    def _use(self, prefix: Prefix, new_from: int | None = None) -> None:
        """Make the prefix the most recently used one.

        Args:
            prefix: the prefix that is used.
            new_from: number of the first chunk that may have entered the pool since the life last used a prefix;
                default: the first chunk after the prefix that it last used.
        """
        use = self._use_of.get(prefix.ordinal)
        if use is None or use.keys is not prefix.keys or use.num_chunks > prefix.num_chunks:
            use = _Use(prefix.ordinal, prefix.keys)
        first_new = use.num_chunks if new_from is None else min(use.num_chunks, new_from)
        num_taken = min(use.num_taken, first_new)
        num_missing = max(num_taken, min(use.num_missing, first_new))
        use.num_taken, use.num_missing, use.num_chunks = 0, 0, prefix.num_chunks
        self._claim(use, range(num_taken))
        self._claim(use, range(num_taken, num_missing))
        self._claim(use, range(first_new, prefix.num_chunks), are_new=True)
        self._put_last(use)

    def _put_last(self, use: _Use) -> None:
        if use.num_last:
            self._use_of[use.ordinal] = use
            self._order[use] = None
            self._order.move_to_end(use)

    def _claim(self, use: _Use, chunks: range, *, are_new: bool = False) -> None:
        """Make `use` the last use of these chunks of its prefix, except chunks that are not in the pool."""
        keys = use.keys[chunks.start : chunks.stop]
        uses = dict(zip(map(self._last_use.get, keys), chunks, strict=True))  # last use → its last chunk
        if are_new or not uses.keys() <= {use, None}:
            self._take_over(use, keys, uses)
            uses = dict(zip(map(self._last_use.get, keys), chunks, strict=True))
        if are_new:
            use.num_chunks = max(uses.get(use, -1) + 1, chunks.start)
            before_last = range(chunks.start, use.num_chunks)
            uses = dict(zip(map(self._last_use.get, keys), before_last, strict=False))
        use.num_missing = max(use.num_missing, uses.get(None, -1) + 1)

    def _take_over(self, use: _Use, keys: Sequence[bytes], uses: Mapping[_Use | None, int]) -> None:
        numbers = Counter(map(self._last_use.get, keys))
        stored = list(filter(self._chunks.committed.__contains__, keys))
        self._last_use.update(dict.fromkeys(stored, use))
        use.num_last += len(stored)
        for other, last_chunk in uses.items():
            if other is not None:
                if other is not use:
                    other.num_taken = max(other.num_taken, last_chunk + 1)
                self._take_from(other, numbers[other])

    def _take_from(self, use: _Use, number: int) -> None:
        use.num_last -= number
        if not use.num_last:
            self._order.pop(use, None)
            if self._use_of.get(use.ordinal) is use:
                del self._use_of[use.ordinal]

    # --- what leaves -----------------------------------------------------------------------------

    @on(e.ChunksTainted)
    def _tainted(self, event: e.ChunksTainted) -> None:
        for key in event.keys:
            self._remove(key)

    def _remove(self, key: bytes) -> None:
        use = self._last_use.pop(key, None)
        if use is not None:
            use.num_missing = use.num_chunks
            self._take_from(use, 1)

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset) -> None:
        self._order.clear()
        self._last_use.clear()
        self._use_of.clear()

    @on(e.ChunksEvicted)
    def _evicted(self, event: e.ChunksEvicted) -> None:
        held, own = list(self.held()), self.own_beginning(event.ordinal)
        self.out_of_turn = []
        for key in event.keys:
            oldest = self._oldest(held, own)
            if key == oldest:
                use = self._last_use.pop(key)
                use.num_chunks -= 1
                self._take_from(use, 1)
            else:
                if key in self._last_use:
                    self.out_of_turn.append((key, oldest))
                self._remove(key)

    def _oldest(self, held: Sequence[Prefix], own: Prefix) -> bytes | None:
        """Return the least recently used chunk that may leave; None if no chunk may."""
        needed: list[_Use] = []
        oldest = None
        for use in self._order:
            chunk, key = self._last_chunk(use)
            # If the last chunk of a prefix has to stay, so do all before it.
            if any(prefix.has(chunk, key) for prefix in held):
                needed.append(use)
            elif not own.has(chunk, key):
                oldest = key
                break
        for use in needed:
            del self._order[use]
        return oldest

    def _last_chunk(self, use: _Use) -> tuple[int, bytes]:
        """Return the number and the key of the last chunk that has `use` as its last use."""
        while self._last_use.get(use.keys[use.num_chunks - 1]) is not use:
            use.num_chunks -= 1
        return use.num_chunks - 1, use.keys[use.num_chunks - 1]
