"""State handlers: what a request's state decides when something happens to the request.

To extend, subclass the handler of a state, override the methods named after the observations that matter, and put it
into a core (`Core.replacing`, or `handlers` in the connector's configuration). A handler is a pure function of its
arguments: no clock, no randomness, no memory of its own.

A request in one of five states has not ended (`Unfinished`). It waits for blocks (`Waiting`), or it has blocks and
computes (`Computing`); a recovering request does both, depending on whether its load has arrived.
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

    The ledger calls the handler of the state that the request was in before the observation moved it.
    """

    state: ClassVar[RequestState]

    def lookup_requested(self, turn: Turn, event: e.LookupRequested) -> None:
        """The scheduler asks how many tokens can be loaded."""

    def blocks_allocated(self, turn: Turn, event: e.BlocksAllocated) -> None:
        """The scheduler gave the request blocks."""

    def request_preempted(self, turn: Turn, event: e.RequestPreempted) -> None:
        """The scheduler took the request's blocks; their bytes are intact until the next forward pass."""

    def session_continued(self, turn: Turn, event: e.SessionContinued) -> None:
        """A streaming session has its next turn."""

    def tokens_rolled_back(self, turn: Turn, event: e.TokensRolledBack) -> None:
        """The scheduler counts fewer computed tokens than before."""

    def request_finished(self, turn: Turn, event: e.RequestFinished) -> None:
        """The request ended; the bytes of its blocks are intact until the next forward pass."""

    def extension_observed(self, turn: Turn, event: e.ExtensionObserved) -> None:
        """An extension observed something; `Extension.payload_of` decodes it."""

    def tokens_scheduled(self, turn: Turn) -> None:
        """A step schedules tokens of the request; not called for a step that only decodes one more token."""

    def tokens_settled(self, turn: Turn, first_chunk: int, num_settled_tokens: int) -> None:
        """Another chunk of the request is settled."""

    def transfer_settled(self, turn: Turn, job: Copy) -> None:
        """A copy of this request was completed or failed on every rank."""


class Unfinished(StateHandler):
    """A request that has not ended: at its end, what is settled is saved."""

    def request_finished(self, turn: Turn, event: e.RequestFinished) -> None:
        """Save what is settled and not saved yet; release the request if no copy is under way.

        Also while it waits: a step may have computed something before its load was reported.
        """
        save_on_finish(turn, event)
        release_if_settled(turn)


class Waiting(Unfinished):
    """A request that waits for blocks: it is answered from the host pool, and loaded when it has blocks."""

    awaits_saves: ClassVar[bool] = True
    """Whether the scheduler is to ask again while a save under way would carry the answer further."""

    def lookup_requested(self, turn: Turn, event: e.LookupRequested) -> None:
        """Answer, or ask the scheduler to ask again."""
        turn.decide(answer_lookup(turn, event, awaits_saves=self.awaits_saves))

    def blocks_allocated(self, turn: Turn, event: e.BlocksAllocated) -> None:
        """Issue the load that the allocation accepts."""
        load_what_was_answered(turn, event)


class Computing(Unfinished):
    """A request that has blocks: what settles is saved, and what it loses is saved in time."""

    def tokens_settled(self, turn: Turn, first_chunk: int, num_settled_tokens: int) -> None:
        """Save the chunks that are settled."""
        save_settled(turn, first_chunk, num_settled_tokens)

    def request_preempted(self, turn: Turn, event: e.RequestPreempted) -> None:
        """Save from the blocks that were taken, before the next forward pass overwrites them."""
        save_on_preemption(turn, event)

    def session_continued(self, turn: Turn, event: e.SessionContinued) -> None:
        """Let the next step wait for saves out of blocks that it may overwrite."""
        fence_saves(turn)

    def tokens_rolled_back(self, turn: Turn, event: e.TokensRolledBack) -> None:
        """Let the next step wait for saves out of blocks that it may overwrite."""
        fence_saves(turn)


class New(Waiting):
    """Nothing of it is computed, so there is nothing to save, and nothing lost that would be worth waiting for."""

    state = RequestState.NEW
    awaits_saves = False

    def tokens_scheduled(self, turn: Turn) -> None:
        """Record how far its prefill is."""
        report_progress(turn)

    def transfer_settled(self, turn: Turn, job: Copy) -> None:
        """Its load may have arrived: record how far its prefill is."""
        report_progress(turn)


class ChunkedPrefill(Computing):
    """Known tokens are still to be computed, so every step may complete the prefill."""

    state = RequestState.CHUNKED_PREFILL

    def blocks_allocated(self, turn: Turn, event: e.BlocksAllocated) -> None:
        """Refuse tokens that no lookup answered. A session's next turn accepts none."""
        load_what_was_answered(turn, event)

    def tokens_scheduled(self, turn: Turn) -> None:
        """Record how far its prefill is."""
        report_progress(turn)


class Running(Computing):
    """Every known token is computed or in flight: there is no progress to record."""

    state = RequestState.RUNNING


class Preempted(Waiting):
    """It has no blocks. What it lost may still be on its way to the host pool."""

    state = RequestState.PREEMPTED


class Recovering(Waiting, Computing):
    """It has blocks again, and a load or a recomputation fills them.

    It is looked up like a preempted request, and stopped like one that has computed tokens.
    """

    state = RequestState.RECOVERING

    def tokens_scheduled(self, turn: Turn) -> None:
        """Record how far its prefill is."""
        report_progress(turn)

    def transfer_settled(self, turn: Turn, job: Copy) -> None:
        """Its load may have arrived: record how far its prefill is."""
        report_progress(turn)


class Finished(StateHandler):
    """It ended. It is released when its last copy is settled."""

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
"""One handler for each state."""


def wrong_state(handler: object) -> str:
    """Return what is wrong with the `state` of a handler or of its class, and what to write; empty if it is right."""
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
