"""What each request was answered and what it took up of it. The audit's own; see `lives.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.model.forgotten import LIFE, Forgotten
from kvledger.lifecycle.audit.model.moment import Check, Moment

if TYPE_CHECKING:
    from kvledger.lifecycle.audit.model.start import Start


class Answer(NamedTuple):
    """The last answer to a lookup."""

    sequence: int
    """0 where that was before the audit began."""
    life: tuple[str, int, int]
    """Request id, ordinal, generation that it was given to."""
    num_computed_tokens: int
    num_external_tokens: int
    is_async: bool


class Allocation(NamedTuple):
    """Blocks that were given, and the answer that they took up."""

    sequence: int
    answer: Answer | None
    num_external_tokens: int


class Answers:
    """Request id -> the answer that no allocation has taken up; and the last allocation, in the same holding of blocks.

    A preemption, the next turn of a session and the end take back both; a reset only what was not taken up.
    """

    def __init__(self) -> None:
        self._pending: dict[str, Answer] = {}
        self._allocations: dict[str, Allocation] = {}
        # The dict's own method. So the dict is changed, never replaced.
        self.allocation: Callable[[str], Allocation | None] = self._allocations.get
        """What the request's last allocation took up."""

    def begin(self, start: Start) -> None:
        """Take over the answers that no allocation has taken up."""
        self._pending.update(start.answers)

    def folds(self, forgotten: Forgotten) -> Iterable[tuple[type[e.Event], Check]]:
        """(event class, fold), to be done as checks are; they never find anything."""
        forgotten.at(
            (*LIFE, e.RequestPreempted, e.SessionContinued, e.RequestFinished), self._pending, self._allocations
        )
        return [
            (e.LookupAnswered, self._answered),
            (e.BlocksAllocated, self._allocated),
            (e.CacheReset, self._reset),
        ]

    def _answered(self, event: e.LookupAnswered, moment: Moment) -> None:
        life = event.request_id, event.ordinal, event.generation
        self._pending[event.request_id] = Answer(
            moment.sequence, life, event.num_computed_tokens, event.num_external_tokens, event.is_async
        )

    def _allocated(self, event: e.BlocksAllocated, moment: Moment) -> None:
        request_id = event.request_id
        answer = self._pending.pop(request_id, None)
        self._allocations[request_id] = Allocation(moment.sequence, answer, event.num_external_tokens)

    def _reset(self, _event: e.CacheReset, _moment: Moment) -> None:
        self._pending.clear()
