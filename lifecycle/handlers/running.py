"""A decoding request: as in prefill, but there is no progress left to report."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.decisions.saves import fence_saves, save_on_preemption, save_settled
from kvledger.lifecycle.handlers.base import StateHandler
from kvledger.lifecycle.handlers.finished import save_and_release
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.turn import Turn


class Running(StateHandler):
    """Every known token is computed or in flight."""

    state = RequestState.RUNNING

    def tokens_settled(self, turn: Turn, first_chunk: int, num_settled_tokens: int) -> None:
        save_settled(turn, first_chunk, num_settled_tokens)

    def request_preempted(self, turn: Turn, event: e.RequestPreempted) -> None:
        save_on_preemption(turn, event)

    def session_continued(self, turn: Turn, event: e.SessionContinued) -> None:
        fence_saves(turn)

    def tokens_rolled_back(self, turn: Turn, event: e.TokensRolledBack) -> None:
        fence_saves(turn)

    def request_finished(self, turn: Turn, event: e.RequestFinished) -> None:
        save_and_release(turn, event)
