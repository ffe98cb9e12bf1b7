"""A preempted request: polled until there are blocks, then loaded as far as the host pool reaches."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.decisions.loads import load_what_was_answered
from kvledger.lifecycle.decisions.lookups import answer_lookup
from kvledger.lifecycle.handlers.base import StateHandler
from kvledger.lifecycle.handlers.finished import save_and_release
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.turn import Turn


class Preempted(StateHandler):
    """It has no blocks. What it lost may still be on its way to the host, and is worth being asked again for."""

    state = RequestState.PREEMPTED

    def lookup_requested(self, turn: Turn, event: e.LookupRequested) -> None:
        turn.decide(answer_lookup(turn, event, awaits_saves=True))

    def blocks_allocated(self, turn: Turn, event: e.BlocksAllocated) -> None:
        load_what_was_answered(turn, event)

    def request_finished(self, turn: Turn, event: e.RequestFinished) -> None:
        # It may have been in one step, whose load is not reported yet: then it has computed something.
        save_and_release(turn, event)
