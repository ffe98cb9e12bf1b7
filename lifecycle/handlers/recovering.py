"""A recovering request: KV comes back into its new blocks; it runs again when its load has arrived."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.decisions import Decisions
from kvledger.lifecycle.decisions.saves import save_on_finish, save_on_preemption
from kvledger.lifecycle.handlers.finished import release_if_settled
from kvledger.lifecycle.handlers.new import Waiting
from kvledger.lifecycle.projections.tracker import RequestRecord
from kvledger.lifecycle.states import RequestState


class Recovering(Waiting):
    """Waits like a new request, and may be preempted or finish like one that has computed tokens."""

    state = RequestState.RECOVERING

    def request_preempted(
        self, event: e.RequestPreempted, record: RequestRecord, projections: Projections, cause: int
    ) -> Decisions:
        return save_on_preemption(event, record, projections, cause)

    def request_finished(
        self, event: e.RequestFinished, record: RequestRecord, projections: Projections, cause: int
    ) -> Decisions:
        yield from save_on_finish(event, record, projections, cause)
        yield from release_if_settled(record, projections, cause)
