"""A finished request: it only waits for its last job, then every projection forgets it."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.decisions import NOTHING, Decisions
from kvledger.lifecycle.decisions.saves import save_on_finish
from kvledger.lifecycle.handlers.base import StateHandler
from kvledger.lifecycle.projections.tracker import RequestRecord
from kvledger.lifecycle.projections.transfers import Job
from kvledger.lifecycle.states import RequestState


def release_if_settled(record: RequestRecord, projections: Projections, cause: int) -> Decisions:
    """Release a finished request that owes no transfer."""
    if projections.transfers.owes(record.ordinal):
        return NOTHING
    return iter((e.RequestReleased(record.request_id, record.generation, cause),))


def save_and_release(
    event: e.RequestFinished, record: RequestRecord, projections: Projections, cause: int
) -> Decisions:
    """Save what is settled and not saved yet, then release what owes no transfer."""
    saves = save_on_finish(event, record, projections, cause)
    if saves is NOTHING:  # mostly, for what is settled was saved as it settled
        return release_if_settled(record, projections, cause)
    return _then_release(saves, record, projections, cause)


def _then_release(saves: Decisions, record: RequestRecord, projections: Projections, cause: int) -> Decisions:
    yield from saves
    yield from release_if_settled(record, projections, cause)


class Finished(StateHandler):
    """The only exit is out of the ledger."""

    state = RequestState.FINISHED

    def transfer_settled(self, job: Job, record: RequestRecord, projections: Projections, cause: int) -> Decisions:
        return release_if_settled(record, projections, cause)
