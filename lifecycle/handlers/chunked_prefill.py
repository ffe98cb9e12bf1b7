"""A request in the middle of its prefill: what settles is saved, what it loses is saved in time."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.decisions import Decisions
from kvledger.lifecycle.decisions.loads import take_up_answer
from kvledger.lifecycle.decisions.progress import tell_progress
from kvledger.lifecycle.decisions.saves import fence_saves, save_on_preemption, save_settled
from kvledger.lifecycle.handlers.base import StateHandler
from kvledger.lifecycle.handlers.finished import save_and_release
from kvledger.lifecycle.projections.tracker import RequestRecord
from kvledger.lifecycle.states import RequestState


class Computing(StateHandler):
    """What requests with computed tokens have in common: saving while they run and when they are stopped."""

    def blocks_allocated(
        self, event: e.BlocksAllocated, record: RequestRecord, projections: Projections, cause: int
    ) -> Decisions:
        # No lookup preceded, so tokens that are taken up here are refused; a session's next turn takes up none.
        return take_up_answer(event, record, projections, cause)

    def tokens_settled(
        self, record: RequestRecord, first_chunk: int, num_settled_tokens: int, projections: Projections, cause: int
    ) -> Decisions:
        return save_settled(record, first_chunk, num_settled_tokens, projections, cause)

    def request_preempted(
        self, event: e.RequestPreempted, record: RequestRecord, projections: Projections, cause: int
    ) -> Decisions:
        return save_on_preemption(event, record, projections, cause)

    def session_continued(
        self, event: e.SessionContinued, record: RequestRecord, projections: Projections, cause: int
    ) -> Decisions:
        return fence_saves(record, projections, cause)

    def tokens_rolled_back(
        self, event: e.TokensRolledBack, record: RequestRecord, projections: Projections, cause: int
    ) -> Decisions:
        return fence_saves(record, projections, cause)

    def request_finished(
        self, event: e.RequestFinished, record: RequestRecord, projections: Projections, cause: int
    ) -> Decisions:
        return save_and_release(event, record, projections, cause)


class ChunkedPrefill(Computing):
    """Known tokens are still to come, so every step may complete the prefill."""

    state = RequestState.CHUNKED_PREFILL

    def tokens_scheduled(self, record: RequestRecord, projections: Projections, cause: int) -> Decisions:
        return tell_progress(record, projections, cause)
