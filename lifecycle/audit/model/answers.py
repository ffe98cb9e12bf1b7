"""What each request was answered, what it claimed of it, and which chunks it relies on. The audit's own."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.model.forgotten import LIFE, Forgotten
from kvledger.lifecycle.audit.model.lives import Lives
from kvledger.lifecycle.audit.model.moment import Moment, num_intact_tokens
from kvledger.lifecycle.audit.model.records import Answer
from kvledger.lifecycle.marks import on

if TYPE_CHECKING:
    from kvledger.lifecycle.audit.model.start import Start


class Allocation(NamedTuple):
    """Blocks that were given, and the answer that they claimed."""

    sequence: int
    answer: Answer | None
    num_external_tokens: int


class Answers:
    """Request id -> the answer that no allocation has claimed; the last allocation, in the same holding of blocks.

    A preemption, the next turn of a session and the end take back both; a reset only what was not claimed. And request
    id -> what a preempted one waits for, until it has blocks again or ends, or a reset.
    """

    def __init__(
        self, lives: Lives, chunk_size: int, moment: Moment, forgotten: Forgotten, *, keep_for_preempted: bool
    ) -> None:
        self._lives = lives
        self._chunk_size = chunk_size
        self._moment = moment
        self._keeps = keep_for_preempted
        self._pending: dict[str, Answer] = {}
        self._allocations: dict[str, Allocation] = {}
        self._waited_for: dict[str, tuple[frozenset[bytes], int]] = {}
        """Keys, and the event of the preemption (0: before the audit began)."""
        taken_back: tuple[type[e.Event], ...] = (*LIFE, e.RequestPreempted, e.SessionContinued, e.RequestFinished)
        forgotten.at(taken_back, self._pending, self._allocations)
        forgotten.at((*LIFE, e.RequestFinished), self._waited_for)

    def allocation(self, request_id: str) -> Allocation | None:
        """What the request's last allocation claimed."""
        return self._allocations.get(request_id)

    def promised(self, key: bytes) -> Iterator[tuple[str, int]]:
        """(request id, event) of each pending answer that promises the chunk."""
        return ((whose, answer.sequence) for whose, answer in self._pending.items() if key in answer.promised)

    def waited_for(self, key: bytes) -> Iterator[tuple[str, int]]:
        """(request id, event) of each preemption after which somebody waits for the chunk."""
        return ((who, sequence) for who, (keys, sequence) in self._waited_for.items() if key in keys)

    def relied_on(self) -> Container[bytes]:
        """Every chunk that is promised or waited for."""
        return frozenset().union(
            *(answer.promised for answer in self._pending.values()), *(keys for keys, _ in self._waited_for.values())
        )

    def begin(self, start: Start) -> None:
        """Take over the answers that no allocation has claimed, and what is waited for."""
        self._pending.update(start.answers)
        self._waited_for.update((who, (frozenset(keys), 0)) for who, keys in start.waited_for.items() if keys)

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        promised = frozenset(self._promised_by(event))
        self._pending[event.request_id] = Answer(self._moment.sequence, event, promised)

    @on(e.LookupDeferred)
    def _deferred(self, event: e.LookupDeferred) -> None:
        if self._lives.in_generation(event) is not None:
            self._pending.pop(event.request_id, None)

    @on(e.DecisionWithheld)
    def _withheld(self, event: e.DecisionWithheld) -> None:
        self._pending.pop(event.request_id, None)

    def _promised_by(self, event: e.LookupAnswered) -> Sequence[bytes]:
        life = self._lives.in_generation(event)
        if life is None or not event.num_external_tokens:
            return ()
        end_token = event.num_computed_tokens + event.num_external_tokens
        return life.keys[: max(0, -(-end_token // self._chunk_size))]

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        request_id = event.request_id
        answer = self._pending.pop(request_id, None)
        self._waited_for.pop(request_id, None)
        self._allocations[request_id] = Allocation(self._moment.sequence, answer, event.num_external_tokens)

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted) -> None:
        life = self._moment.life
        keys = [] if life is None or not self._keeps else life.keys[: num_intact_tokens(event) // self._chunk_size]
        if keys:
            self._waited_for[event.request_id] = frozenset(keys), self._moment.sequence

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset) -> None:
        self._pending.clear()
        self._waited_for.clear()
