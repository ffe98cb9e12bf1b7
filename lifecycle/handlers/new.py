"""A new request: answered from the host pool, given a load, moved by its first scheduled tokens."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.decisions import Decisions
from kvledger.lifecycle.decisions.loads import take_up_answer
from kvledger.lifecycle.decisions.lookups import answer_lookup
from kvledger.lifecycle.decisions.progress import tell_progress
from kvledger.lifecycle.handlers.base import StateHandler
from kvledger.lifecycle.handlers.finished import save_and_release
from kvledger.lifecycle.projections.tracker import RequestRecord
from kvledger.lifecycle.projections.transfers import Job
from kvledger.lifecycle.states import RequestState


class Waiting(StateHandler):
    """What new, preempted and recovering requests have in common: lookups, loads, and a way out of waiting."""

    def lookup_requested(
        self, event: e.LookupRequested, record: RequestRecord, projections: Projections, cause: int
    ) -> Decisions:
        return answer_lookup(event, record, projections, cause)

    def blocks_allocated(
        self, event: e.BlocksAllocated, record: RequestRecord, projections: Projections, cause: int
    ) -> Decisions:
        return take_up_answer(event, record, projections, cause)

    def tokens_scheduled(self, record: RequestRecord, projections: Projections, cause: int) -> Decisions:
        return tell_progress(record, projections, cause)

    def transfer_settled(self, job: Job, record: RequestRecord, projections: Projections, cause: int) -> Decisions:
        return tell_progress(record, projections, cause)

    def request_finished(
        self, event: e.RequestFinished, record: RequestRecord, projections: Projections, cause: int
    ) -> Decisions:
        # It may have been in one step, whose load is not reported yet: then it has computed something.
        return save_and_release(event, record, projections, cause)


class New(Waiting):
    """Nothing is computed, as far as the steps have told."""

    state = RequestState.NEW
