"""What each request was answered and what it claimed of it. The audit's own; see `lives.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.model.forgotten import LIFE, Forgotten
from kvledger.lifecycle.audit.model.moment import Moment, on

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
    """Blocks that were given, and the answer that they claimed."""

    sequence: int
    answer: Answer | None
    num_external_tokens: int


class Answers:
    """Request id -> the answer that no allocation has claimed; and the last allocation, in the same holding of blocks.

    A preemption, the next turn of a session and the end take back both; a reset only what was not claimed.
    """

    def __init__(self, moment: Moment, forgotten: Forgotten) -> None:
        self._moment = moment
        self._pending: dict[str, Answer] = {}
        self._allocations: dict[str, Allocation] = {}
        taken_back: tuple[type[e.Event], ...] = (*LIFE, e.RequestPreempted, e.SessionContinued, e.RequestFinished)
        forgotten.at(taken_back, self._pending, self._allocations)
        # The dict's own method. So the dict is changed, never replaced.
        self.allocation: Callable[[str], Allocation | None] = self._allocations.get
        """What the request's last allocation claimed."""

    def begin(self, start: Start) -> None:
        """Take over the answers that no allocation has claimed."""
        self._pending.update(start.answers)

    @on(e.LookupAnswered)
    def _answered(self, event: e.LookupAnswered) -> None:
        life = event.request_id, event.ordinal, event.generation
        self._pending[event.request_id] = Answer(
            self._moment.sequence, life, event.num_computed_tokens, event.num_external_tokens, event.is_async
        )

    @on(e.BlocksAllocated)
    def _allocated(self, event: e.BlocksAllocated) -> None:
        request_id = event.request_id
        answer = self._pending.pop(request_id, None)
        self._allocations[request_id] = Allocation(self._moment.sequence, answer, event.num_external_tokens)

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset) -> None:
        self._pending.clear()
