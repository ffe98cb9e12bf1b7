"""A finished request: it only waits for its last job, then every projection forgets it."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.decisions.release import release_if_settled
from kvledger.lifecycle.decisions.saves import save_on_finish
from kvledger.lifecycle.handlers.base import StateHandler
from kvledger.lifecycle.projections.transfers import Job
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.turn import Turn


def save_and_release(turn: Turn, event: e.RequestFinished) -> None:
    """Save what is settled and not saved yet, then release what owes no transfer."""
    save_on_finish(turn, event)
    release_if_settled(turn)


class Finished(StateHandler):
    """The only exit is out of the ledger."""

    state = RequestState.FINISHED

    def transfer_settled(self, turn: Turn, job: Job) -> None:
        release_if_settled(turn)
