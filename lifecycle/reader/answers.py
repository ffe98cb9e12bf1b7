"""The answer that each request got, the allocation that claimed it, and the chunks that the request relies on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.chains import Chains, StoredPrefix
from kvledger.lifecycle.reader.forgotten import LIFE, Forgotten
from kvledger.lifecycle.reader.lives import Lives
from kvledger.lifecycle.reader.moment import Moment, num_intact_tokens
from kvledger.lifecycle.reader.records import Answer, Prefix


class Allocation(NamedTuple):
    """One allocation of blocks, and the answer that it claimed."""

    sequence: int
    answer: Answer | None
    num_external_tokens: int


_StoredAnswer = tuple[int, e.LookupAnswered, StoredPrefix]


class StoredAnswers(msgspec.Struct, forbid_unknown_fields=True):
    """State of `Answers`, as plain values. Keys are request ids."""

    pending: dict[str, _StoredAnswer]
    allocations: dict[str, tuple[int, _StoredAnswer | None, int]]
    waited_for: dict[str, tuple[StoredPrefix, int]]


class Answers:
    """By request id: the unclaimed answer, the last allocation, and the chunks that a preempted request waits for.

    Answer and allocation are forgotten when the request is preempted, continues with a session's next turn, or
    finishes. If its states refuse the preemption or the turn, only the allocation is forgotten. A reset removes the
    answer. A preempted request waits until it has blocks again, until it finishes, or until a reset.
    """

    def __init__(
        self, lives: Lives, chunk_size: int, moment: Moment, forgotten: Forgotten, *, keep_for_preempted: bool
    ) -> None:
        self._lives = lives
        self.chunk_size = chunk_size
        self._moment = moment
        self._keeps = keep_for_preempted
        self._pending: dict[str, Answer] = {}
        self._allocations: dict[str, Allocation] = {}
        self._waited_for: dict[str, tuple[Prefix, int]] = {}
        """Request id → (chunks that it waits for, sequence number of the preemption)."""
        self.let_go: list[Prefix] = []
        """Prefixes that the current event's request no longer relies on; only at events of `ENDS`."""
        taken_back: tuple[type[e.Event], ...] = (*LIFE, e.RequestPreempted, e.SessionContinued, e.RequestFinished)
        forgotten.at(taken_back, self._allocations)

    def allocation(self, request_id: str) -> Allocation | None:
        """Return the request's last allocation."""
        return self._allocations.get(request_id)

    def promised(self, key: bytes) -> Iterator[tuple[str, int]]:
        """Yield (request id, sequence number) of each pending answer that promises the chunk."""
        return (
            (request_id, answer.sequence)
            for request_id, answer in self._pending.items()
            if key in answer.promised.key_set
        )

    def waited_for(self, key: bytes) -> Iterator[tuple[str, int]]:
        """Yield (request id, sequence number) of each preemption after which the request waits for the chunk."""
        return (
            (request_id, sequence)
            for request_id, (prefix, sequence) in self._waited_for.items()
            if key in prefix.key_set
        )

    def prefixes(self) -> Iterator[Prefix]:
        """Yield each prefix that a pending answer promises, or for which a preempted request waits."""
        yield from (answer.promised for answer in self._pending.values())
        yield from (prefix for prefix, _ in self._waited_for.values())

    def stored(self, chains: Chains) -> StoredAnswers:
        """Return the state."""

        def as_stored(answer: Answer) -> _StoredAnswer:
            return answer.sequence, answer.event, chains.stored(answer.promised)

        return StoredAnswers(
            {request_id: as_stored(answer) for request_id, answer in self._pending.items()},
            {
                request_id: (
                    each.sequence,
                    None if each.answer is None else as_stored(each.answer),
                    each.num_external_tokens,
                )
                for request_id, each in self._allocations.items()
            },
            {
                request_id: (chains.stored(prefix), sequence)
                for request_id, (prefix, sequence) in self._waited_for.items()
            },
        )

    def resume(self, stored: StoredAnswers, chains: Chains) -> None:
        """Restore a stored state."""

        def answer(each: _StoredAnswer) -> Answer:
            return Answer(each[0], each[1], chains.prefix(each[2]))

        self._pending.update((request_id, answer(each)) for request_id, each in stored.pending.items())
        self._allocations.update(
            (request_id, Allocation(sequence, None if claimed is None else answer(claimed), num_tokens))
            for request_id, (sequence, claimed, num_tokens) in stored.allocations.items()
        )
        self._waited_for.update(
            (request_id, (chains.prefix(each), at)) for request_id, (each, at) in stored.waited_for.items()
        )

    def lost(self) -> None:
        """Forget the answers, allocations and waits, because events are missing."""
        self._pending.clear()
        self._allocations.clear()
        self._waited_for.clear()
        self.let_go = []

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        before = self._pending.get(event.request_id)
        promised = self._promised_by(event)
        self.let_go = []
        if before is not None:
            # Most answers repeat the one before: the promise is the same, and does not end.
            if before.promised.keys is promised.keys and before.promised.num_chunks == promised.num_chunks:
                promised = before.promised
            else:
                self.let_go.append(before.promised)
        self._pending[event.request_id] = Answer(self._moment.sequence, event, promised)

    @on(e.LookupDeferred)
    def _deferred(self, event: e.LookupDeferred) -> None:
        self.let_go = [] if self._lives.in_generation(event) is None else self._take_back(event.request_id)

    @on(e.DecisionWithheld)
    def _withheld(self, event: e.DecisionWithheld) -> None:
        self.let_go = self._take_back(event.request_id)

    def _promised_by(self, event: e.LookupAnswered) -> Prefix:
        life = self._lives.in_generation(event) if event.num_external_tokens else None
        end_token = event.num_computed_tokens + event.num_external_tokens
        return Prefix.of(life, -(-end_token // self.chunk_size))

    def _take_back(self, request_id: str) -> list[Prefix]:
        answer = self._pending.pop(request_id, None)
        return [] if answer is None else [answer.promised]

    def _wait_no_more(self, request_id: str) -> list[Prefix]:
        prefix, _ = self._waited_for.pop(request_id, (None, 0))
        return [] if prefix is None else [prefix]

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        request_id = event.request_id
        answer = self._pending.get(request_id)
        self.let_go = [*self._take_back(request_id), *self._wait_no_more(request_id)]
        self._allocations[request_id] = Allocation(self._moment.sequence, answer, event.num_external_tokens)

    @on(e.SessionContinued)
    def _continued(self, event: e.SessionContinued) -> None:
        self.let_go = [] if self._moment.is_refused else self._take_back(event.request_id)

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted) -> None:
        self.let_go = [] if self._moment.is_refused else self._take_back(event.request_id)
        life = self._moment.life
        if life is not None and self._keeps:
            self.let_go += self._wait_no_more(event.request_id)
            prefix = Prefix.of(life, num_intact_tokens(event) // self.chunk_size)
            self._waited_for[event.request_id] = prefix, self._moment.sequence

    @on(*LIFE, e.RequestFinished)
    def _ended(self, event: e.RequestEvent) -> None:
        self.let_go = [*self._take_back(event.request_id), *self._wait_no_more(event.request_id)]

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset) -> None:
        self._pending.clear()
        self._waited_for.clear()


ENDS: tuple[type[e.Event], ...] = (
    e.LookupAnswered,
    e.LookupDeferred,
    e.DecisionWithheld,
    e.BlocksAllocated,
    e.SessionContinued,
    e.RequestPreempted,
    e.RequestFinished,
    *LIFE,
)
"""Events that may end a promise or a wait."""
