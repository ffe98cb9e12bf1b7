"""State handlers: what kvledger decides in each state of a request.

To change a decision, subclass the handler of a state, override methods, which are named after observations, and put it
into a core: `Core.replacing`, or `handlers` in the connector's configuration. A handler must be a pure function of its
arguments: no clock, no randomness, no memory.

In five of the six states a request has not ended (`Unfinished`). It waits for blocks (`Waiting`), or it has blocks and
computes (`Computing`). A recovering request does both, depending on whether its load has arrived.
"""

from __future__ import annotations

import difflib
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.decisions.loads import load_what_was_answered
from kvledger.lifecycle.decisions.lookups import answer_lookup
from kvledger.lifecycle.decisions.reports import release_if_settled, report_progress
from kvledger.lifecycle.decisions.saves import fence_saves, save_on_finish, save_on_preemption, save_settled
from kvledger.lifecycle.projections.copies import Copy
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.turn import Turn

__all__ = [
    "STANDARD_HANDLERS",
    "ChunkedPrefill",
    "Computing",
    "Finished",
    "New",
    "Preempted",
    "Recovering",
    "Running",
    "StateHandler",
    "Unfinished",
    "Waiting",
]


class StateHandler:
    """Decides nothing. `turn.record` and `turn.projections` already contain the observation.

    The ledger calls the handler of the state that the request was in before the observation.
    """

    state: ClassVar[RequestState]

    def lookup_requested(self, turn: Turn, event: e.LookupRequested) -> None:
        """The scheduler asks how many tokens can be loaded."""

    def blocks_allocated(self, turn: Turn, event: e.BlocksAllocated) -> None:
        """The scheduler gave the request blocks."""

    def request_preempted(self, turn: Turn, event: e.RequestPreempted) -> None:
        """The scheduler took the request's blocks. Their contents are intact until the next forward pass."""

    def session_continued(self, turn: Turn, event: e.SessionContinued) -> None:
        """A streaming session continues with its next turn."""

    def tokens_rolled_back(self, turn: Turn, event: e.TokensRolledBack) -> None:
        """The scheduler counts fewer computed tokens than before."""

    def request_finished(self, turn: Turn, event: e.RequestFinished) -> None:
        """The request ended. The contents of its blocks are intact until the next forward pass."""

    def extension_observed(self, turn: Turn, event: e.ExtensionObserved) -> None:
        """An extension made an observation; `Extension.payload_of` decodes it."""

    def tokens_scheduled(self, turn: Turn) -> None:
        """A step schedules tokens of the request. Not called if it decodes one more token, as expected."""

    def tokens_settled(self, turn: Turn, first_chunk: int, num_settled_tokens: int) -> None:
        """More chunks of the request are settled."""

    def transfer_settled(self, turn: Turn, job: Copy) -> None:
        """A copy of the request completed or failed."""


class Unfinished(StateHandler):
    """A request that has not ended. Settled chunks are saved when it ends."""

    def request_finished(self, turn: Turn, event: e.RequestFinished) -> None:
        """Save settled chunks that are not saved yet; release the request if no copy is in flight.

        A waiting request may have such chunks too: a step may have computed them before its load was reported.
        """
        save_on_finish(turn, event)
        release_if_settled(turn)


class Waiting(Unfinished):
    """A request that waits for blocks. It is offered what the host pool has, and loads when it gets blocks."""

    awaits_saves: ClassVar[bool] = True
    """Whether the scheduler repeats a lookup while a save in flight would extend the hit."""

    def lookup_requested(self, turn: Turn, event: e.LookupRequested) -> None:
        """Answer, or ask the scheduler to repeat the lookup later."""
        turn.decide(answer_lookup(turn, event, awaits_saves=self.awaits_saves))

    def blocks_allocated(self, turn: Turn, event: e.BlocksAllocated) -> None:
        """Issue the load that the allocation accepts."""
        load_what_was_answered(turn, event)


class Computing(Unfinished):
    """A request that has blocks. What settles is saved, and so is what it loses."""

    def tokens_settled(self, turn: Turn, first_chunk: int, num_settled_tokens: int) -> None:
        """Save the settled chunks."""
        save_settled(turn, first_chunk, num_settled_tokens)

    def request_preempted(self, turn: Turn, event: e.RequestPreempted) -> None:
        """Save from the lost blocks before the next forward pass overwrites them."""
        save_on_preemption(turn, event)

    def session_continued(self, turn: Turn, event: e.SessionContinued) -> None:
        """Make the next step wait for saves from blocks that it may overwrite."""
        fence_saves(turn)

    def tokens_rolled_back(self, turn: Turn, event: e.TokensRolledBack) -> None:
        """Make the next step wait for saves from blocks that it may overwrite."""
        fence_saves(turn)


class New(Waiting):
    """Nothing is computed, so there is nothing to save and no save of its own to wait for."""

    state = RequestState.NEW
    awaits_saves = False

    def tokens_scheduled(self, turn: Turn) -> None:
        """Record the progress of its prefill."""
        report_progress(turn)

    def transfer_settled(self, turn: Turn, job: Copy) -> None:
        """Record the progress of its prefill: its load may have arrived."""
        report_progress(turn)


class ChunkedPrefill(Computing):
    """Some known tokens are not computed yet. Any step may complete the prefill."""

    state = RequestState.CHUNKED_PREFILL

    def blocks_allocated(self, turn: Turn, event: e.BlocksAllocated) -> None:
        """Refuse tokens that no lookup answered. The next turn of a session accepts none."""
        load_what_was_answered(turn, event)

    def tokens_scheduled(self, turn: Turn) -> None:
        """Record the progress of its prefill."""
        report_progress(turn)


class Running(Computing):
    """Every known token is computed or in flight, so there is no progress to record."""

    state = RequestState.RUNNING


class Preempted(Waiting):
    """It has no blocks. Saves of what it lost may be in flight."""

    state = RequestState.PREEMPTED


class Recovering(Waiting, Computing):
    """It has blocks again, which a load or a recomputation fills.

    It is looked up like a preempted request, and preempted or ended like one that has computed tokens.
    """

    state = RequestState.RECOVERING

    def tokens_scheduled(self, turn: Turn) -> None:
        """Record the progress of its prefill."""
        report_progress(turn)

    def transfer_settled(self, turn: Turn, job: Copy) -> None:
        """Record the progress of its prefill: its load may have arrived."""
        report_progress(turn)


class Finished(StateHandler):
    """It has ended. It is released when its last copy is settled."""

    state = RequestState.FINISHED

    def transfer_settled(self, turn: Turn, job: Copy) -> None:
        """Release it if this was the last copy."""
        release_if_settled(turn)


STANDARD_HANDLERS: tuple[StateHandler, ...] = (
    New(),
    ChunkedPrefill(),
    Running(),
    Preempted(),
    Recovering(),
    Finished(),
)
"""One handler per state."""


def wrong_state(handler: object) -> str:
    """Return what is wrong with the `state` of a handler or its class, and what to write; empty if it is right."""
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
"""Methods that a handler may have."""
