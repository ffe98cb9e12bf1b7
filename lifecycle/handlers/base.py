"""What every state handler is: methods named after observations; each returns decisions, or yields them.

To extend: subclass the handler of a state (or this class), override the methods named after the observations
you care about, and register it (`HandlerRegistry.replace`, or `handlers` in the connector's configuration).
A handler must be a pure function of its arguments: no clock, no randomness, no memory of its own.
"""

from __future__ import annotations

from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.decisions import NOTHING, Decisions
from kvledger.lifecycle.projections.tracker import RequestRecord
from kvledger.lifecycle.projections.transfers import Job
from kvledger.lifecycle.states import RequestState


class StateHandler:
    """Decides nothing. `record` and `projections` already contain the observation.

    A method is called on the handler of the state the request was in *before* the observation moved it.
    """

    state: ClassVar[RequestState]

    def lookup_requested(
        self, event: e.LookupRequested, record: RequestRecord, projections: Projections, cause: int
    ) -> Decisions:
        """The scheduler asks how much can be loaded."""
        return NOTHING

    def blocks_allocated(
        self, event: e.BlocksAllocated, record: RequestRecord, projections: Projections, cause: int
    ) -> Decisions:
        """Blocks were given."""
        return NOTHING

    def request_preempted(
        self, event: e.RequestPreempted, record: RequestRecord, projections: Projections, cause: int
    ) -> Decisions:
        """Blocks were taken; their bytes are intact until the next forward."""
        return NOTHING

    def session_continued(
        self, event: e.SessionContinued, record: RequestRecord, projections: Projections, cause: int
    ) -> Decisions:
        """A streaming session's next turn."""
        return NOTHING

    def tokens_rolled_back(
        self, event: e.TokensRolledBack, record: RequestRecord, projections: Projections, cause: int
    ) -> Decisions:
        """The scheduler counts fewer computed tokens."""
        return NOTHING

    def request_finished(
        self, event: e.RequestFinished, record: RequestRecord, projections: Projections, cause: int
    ) -> Decisions:
        """No further scheduling; its blocks' bytes are intact until the next forward."""
        return NOTHING

    def tokens_scheduled(self, record: RequestRecord, projections: Projections, cause: int) -> Decisions:
        """A step schedules tokens of the request in another way than one more decoded token."""
        return NOTHING

    def tokens_settled(
        self, record: RequestRecord, first_chunk: int, num_settled_tokens: int, projections: Projections, cause: int
    ) -> Decisions:
        """Another chunk of the request is settled."""
        return NOTHING

    def transfer_settled(self, job: Job, record: RequestRecord, projections: Projections, cause: int) -> Decisions:
        """A job of this request was completed or failed on every rank."""
        return NOTHING
