"""What may leave the host pool, in which order, and what has to stay.

The order is that of a plain list of chunks, of which each use moves a whole prefix to the end, the first chunk of the
prompt last. The list itself would cost a long request its whole prompt for each save. What is kept is the list of the
uses, and for each chunk its last use.
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
    """What the room knows, as plain values. Uses are named by their places in `uses`."""

    uses: list[tuple[StoredPrefix, int, int]]
    """Each with the chunks at its beginning among which are all that were taken over, and all that are missing."""
    last_uses: dict[bytes, int]
    order: list[int]
    use_of: dict[int, int]


@attrs.define(eq=False)
class _Use:
    """The last use of some chunks: those of a prefix that no later use took over."""

    ordinal: int
    """Of the life whose prefix it is."""
    keys: Sequence[bytes]
    num_chunks: int = 0
    """Of the prefix; without those at its end that are not in the pool."""
    num_taken: int = 0
    """Chunks at its beginning among which are all that a later use took over."""
    num_missing: int = 0
    """Chunks at its beginning among which are all that are not in the pool. Another life's save may bring them."""
    num_last: int = 0
    """Chunks in the pool that it is the last use of."""


class Room:
    """To be folded after the answers, the jobs and the chunks.

    A prefix is held by a pending answer that promised it, a preempted request that waits for it, and a copy in flight
    that reads it or brings its last chunk. The end of each is a use.
    """

    def __init__(self, lives: Lives, copies: Copies, chunks: Chunks, answers: Answers, moment: Moment) -> None:
        self._lives, self._copies, self._chunks, self._answers = lives, copies, chunks, answers
        self._moment = moment
        self._chunk_size = answers.chunk_size
        self._order: OrderedDict[_Use, None] = OrderedDict()
        """Uses, least recent first; without those found to be of chunks that are held, which will be used again."""
        self._last_use: dict[bytes, _Use] = {}
        """Chunk in the pool → its last use."""
        self._use_of: dict[int, _Use] = {}
        """Ordinal → the life's last use, while it is the last one of any chunk."""
        self.out_of_turn: list[tuple[bytes, bytes | None]] = []
        """Of an eviction: chunks that left before their turn, and whose turn it was; None: nobody's."""

    def held(self) -> Iterator[Prefix]:
        """What has to stay, whoever saves."""
        yield from self._answers.prefixes()
        yield from self._copies.prefixes()

    def relied_on(self) -> frozenset[bytes]:
        """Every chunk of what is held."""
        return frozenset().union(*(prefix.key_set for prefix in self.held()))

    def own_beginning(self, ordinal: int) -> Prefix:
        """What a save of this life evicts nothing of: its settled chunks, or all where that is not known."""
        life = self._lives.of(ordinal)
        if life is None:
            return Prefix.of(None, 0)
        num_settled_tokens, sequence = life.settled
        return Prefix.of(life, num_settled_tokens // self._chunk_size if sequence else len(life.keys))

    def leaving(self, ordinal: int) -> Iterator[bytes]:
        """Chunks that may leave for a save of this life, in the order in which they would leave."""
        held, own = list(self.held()), self.own_beginning(ordinal)
        self._oldest(held, own)  # no later call looks at uses of chunks that are held
        for use in self._order:
            chunk, key = self._last_chunk(use)
            while chunk >= 0 and not own.has(chunk, key) and not any(prefix.has(chunk, key) for prefix in held):
                if self._last_use.get(key) is use:
                    yield key
                chunk, key = chunk - 1, use.keys[chunk - 1]

    def stored(self, chains: Chains) -> StoredRoom:
        """What is known now."""
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
        """Know what was stored, and nothing else. Raises `ValueError` where it does not fit together."""
        uses = []
        for stored_prefix, num_taken, num_missing in stored.uses:
            prefix = chains.prefix(stored_prefix)
            uses.append(_Use(prefix.ordinal, prefix.keys, prefix.num_chunks, num_taken, num_missing))
        known = [frozenset(use.keys[: use.num_chunks]) for use in uses]
        for key, number in stored.last_uses.items():
            if key not in known[number]:
                raise ValueError("a chunk is said to be used last with a prefix that it is not in")
            self._last_use[key] = uses[number]
            uses[number].num_last += 1
        if not all(uses[number].num_last for number in (*stored.order, *stored.use_of.values())):
            raise ValueError("a use is said to be the last one of some chunk, and is of none")
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
        """Let the prefix be the youngest.

        Args:
            prefix: what is used.
            new_from: the first chunk that may have come into the pool since the life's last use.
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
        """Let it be the last use of these chunks of its prefix, as far as they are in the pool."""
        keys = use.keys[chunks.start : chunks.stop]
        uses = dict(zip(map(self._last_use.get, keys), chunks, strict=True))  # the last chunk of each
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
        """The chunk that was used least recently, of those that may leave."""
        needed: list[_Use] = []
        oldest = None
        for use in self._order:
            chunk, key = self._last_chunk(use)
            # Of one prefix: if its last chunk has to stay, all before that have to.
            if any(prefix.has(chunk, key) for prefix in held):
                needed.append(use)
            elif not own.has(chunk, key):
                oldest = key
                break
        for use in needed:
            del self._order[use]
        return oldest

    def _last_chunk(self, use: _Use) -> tuple[int, bytes]:
        """The last chunk of a use that was not used since, and its key."""
        while self._last_use.get(use.keys[use.num_chunks - 1]) is not use:
            use.num_chunks -= 1
        return use.num_chunks - 1, use.keys[use.num_chunks - 1]
