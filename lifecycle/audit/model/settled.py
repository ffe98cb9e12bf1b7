"""How many tokens of each request were certainly written, as far as a log shows. The audit's own count."""

from __future__ import annotations

from collections.abc import Callable

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.model.forgotten import LIFE, Forgotten
from kvledger.lifecycle.audit.model.lives import Lives
from kvledger.lifecycle.audit.model.moment import Moment, on
from kvledger.lifecycle.states import RequestState

_PREEMPTED = RequestState.PREEMPTED


class SettledTokens:
    """Request id -> (number of settled tokens, sequence of the event that says so)."""

    def __init__(self, lives: Lives, moment: Moment, forgotten: Forgotten) -> None:
        self._moment = moment
        self._lives = lives
        self._settled: dict[str, tuple[int, int]] = {}
        forgotten.at(LIFE, self._settled)
        # The dict's own method, because it is asked for every save. So the dict is changed, never replaced.
        self.known: Callable[[str], tuple[int, int] | None] = self._settled.get
        """The count and the event that has it, or None."""

    def of(self, request_id: str) -> tuple[int, int]:
        """The count and the event that has it; zeros where none has."""
        return self._settled.get(request_id, (0, 0))

    def at_least(self, request_id: str) -> tuple[int, int]:
        """The same, but zeros also where only a bound is known."""
        known = self._settled.get(request_id, (0, 0))
        return known if known[1] else (0, 0)

    def begin(self) -> None:
        """Start in the middle of a log, where nothing tells more than a bound: what was computed."""
        lives = self._lives
        self._settled.update((life.request_id, (lives.num_computed_tokens(life), 0)) for life in lives)

    @on(e.StepScheduled)
    def _step_scheduled(self, event: e.StepScheduled) -> None:
        if event.settled:
            settled, life_of, sequence = self._settled, self._lives.of, self._moment.sequence
            for ordinal, _, num_settled_tokens in event.settled:
                life = life_of(ordinal)
                if life is not None:
                    settled[life.request_id] = (num_settled_tokens, sequence)

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted) -> None:
        self._settled[event.request_id] = (event.num_intact_tokens, self._moment.sequence)

    @on(e.RequestFinished)
    def _finished(self, event: e.RequestFinished) -> None:
        self._settled[event.request_id] = (min(event.num_intact_tokens, event.num_tokens - 1), self._moment.sequence)

    @on(e.SessionContinued, e.TokensRolledBack)
    def _cut(self, event: e.SessionContinued | e.TokensRolledBack) -> None:
        before, told_at = self._settled.get(event.request_id, (0, self._moment.sequence))
        self._settled[event.request_id] = (
            min(before, event.num_computed_tokens),
            self._moment.sequence if told_at else 0,
        )

    @on(e.BlocksAllocated)
    def _blocks_allocated(self, event: e.BlocksAllocated) -> None:
        if self._moment.state_before is _PREEMPTED:  # they are others than those it had: nothing is written yet
            self._settled.pop(event.request_id, None)
