"""A recovering request: KV comes back into its new blocks; it runs again when its load has arrived."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.decisions.loads import load_what_was_answered
from kvledger.lifecycle.decisions.lookups import answer_lookup
from kvledger.lifecycle.decisions.progress import report_progress
from kvledger.lifecycle.decisions.saves import fence_saves, save_on_preemption, save_settled
from kvledger.lifecycle.handlers.base import StateHandler
from kvledger.lifecycle.handlers.finished import save_and_release
from kvledger.lifecycle.projections.transfers import Job
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.turn import Turn


class Recovering(StateHandler):
    """Is looked up and leaves waiting like a preempted request; is stopped like one that has computed tokens."""

    state = RequestState.RECOVERING

    def lookup_requested(self, turn: Turn, event: e.LookupRequested) -> None:
        turn.decide(answer_lookup(turn, event, awaits_saves=True))

    def blocks_allocated(self, turn: Turn, event: e.BlocksAllocated) -> None:
        load_what_was_answered(turn, event)

    def tokens_scheduled(self, turn: Turn) -> None:
        report_progress(turn)

    def tokens_settled(self, turn: Turn, first_chunk: int, num_settled_tokens: int) -> None:
        save_settled(turn, first_chunk, num_settled_tokens)

    def transfer_settled(self, turn: Turn, job: Job) -> None:
        report_progress(turn)

    def request_preempted(self, turn: Turn, event: e.RequestPreempted) -> None:
        save_on_preemption(turn, event)

    def tokens_rolled_back(self, turn: Turn, event: e.TokensRolledBack) -> None:
        fence_saves(turn)

    def request_finished(self, turn: Turn, event: e.RequestFinished) -> None:
        save_and_release(turn, event)
