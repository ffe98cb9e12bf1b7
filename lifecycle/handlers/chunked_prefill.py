"""A request in the middle of its prefill: what settles is saved, what it loses is saved in time."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.decisions.loads import load_what_was_answered
from kvledger.lifecycle.decisions.progress import report_progress
from kvledger.lifecycle.decisions.saves import fence_saves, save_on_preemption, save_settled
from kvledger.lifecycle.handlers.base import StateHandler
from kvledger.lifecycle.handlers.finished import save_and_release
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.turn import Turn


class ChunkedPrefill(StateHandler):
    """Known tokens are still to come, so every step may complete the prefill."""

    state = RequestState.CHUNKED_PREFILL

    def blocks_allocated(self, turn: Turn, event: e.BlocksAllocated) -> None:
        # No lookup preceded, so tokens that are accepted here are refused; a session's next turn accepts none.
        load_what_was_answered(turn, event)

    def tokens_scheduled(self, turn: Turn) -> None:
        report_progress(turn)

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
