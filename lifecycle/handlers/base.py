"""What every state handler is: methods named after observations, each with a turn to decide in.

To extend: subclass the handler of a state (or this class), override the methods named after the observations
you care about, and put it into a core (`Core.replacing`, or `handlers` in the connector's configuration).
A handler must be a pure function of its arguments: no clock, no randomness, no memory of its own.
"""

from __future__ import annotations

import difflib
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.transfers import Job
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.turn import Turn


class StateHandler:
    """Decides nothing. `turn.record` and `turn.projections` already contain the observation.

    A method is called on the handler of the state the request was in *before* the observation moved it.
    """

    state: ClassVar[RequestState]

    def lookup_requested(self, turn: Turn, event: e.LookupRequested) -> None:
        """The scheduler asks how much can be loaded."""

    def blocks_allocated(self, turn: Turn, event: e.BlocksAllocated) -> None:
        """Blocks were given."""

    def request_preempted(self, turn: Turn, event: e.RequestPreempted) -> None:
        """Blocks were taken; their bytes are intact until the next forward."""

    def session_continued(self, turn: Turn, event: e.SessionContinued) -> None:
        """A streaming session's next turn."""

    def tokens_rolled_back(self, turn: Turn, event: e.TokensRolledBack) -> None:
        """The scheduler counts fewer computed tokens."""

    def request_finished(self, turn: Turn, event: e.RequestFinished) -> None:
        """No further scheduling; its blocks' bytes are intact until the next forward."""

    def extension_observed(self, turn: Turn, event: e.ExtensionObserved) -> None:
        """An extension has seen something; `Extension.payload_of` says what."""

    def tokens_scheduled(self, turn: Turn) -> None:
        """A step schedules tokens of the request in another way than one more decoded token."""

    def tokens_settled(self, turn: Turn, first_chunk: int, num_settled_tokens: int) -> None:
        """Another chunk of the request is settled."""

    def transfer_settled(self, turn: Turn, job: Job) -> None:
        """A job of this request was completed or failed on every rank."""


def wrong_state(handler: object) -> str:
    """Say what is wrong with the `state` of a handler or of its class, and what to write; empty if it is right."""
    state = getattr(handler, "state", None)
    if isinstance(state, RequestState):
        return ""
    if state is None:
        return f"has no state; write `state = RequestState.RUNNING`, or another one of {_STATES}"
    meant = difflib.get_close_matches(str(state).lower(), [each.value for each in RequestState], n=1)
    remedy = f"`state = RequestState.{RequestState(meant[0]).name}`" if meant else f"one of {_STATES}"
    return f"has state {state!r}, which is of type {type(state).__name__}, not RequestState; write {remedy}"


_STATES = ", ".join(f"RequestState.{state.name}" for state in RequestState)
HOOKS = tuple(name for name in vars(StateHandler) if not name.startswith("_"))
"""The methods that a handler may have."""
