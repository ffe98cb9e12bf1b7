"""State handlers: what kvledger decides in each state of a request.

To change a decision, subclass the handler of a state and override methods, which are named after observations. Put the
new handler into a core with `Core.replacing`, or name it under `handlers` in the connector's configuration. A handler
must be a pure function of its arguments: no clock, no randomness, no memory.

In five of the six states a request has not ended (`Unfinished`). Such a request waits for blocks (`Waiting`), or has
blocks and computes (`Computing`). A recovering request waits until its load has arrived, and computes from then on.
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
    """Base class of handlers, which decides nothing.

    The ledger calls the handler of the state in which the request was before the observation. `turn.record` and
    `turn.projections` already contain the observation.
    """

    state: ClassVar[RequestState]

    def lookup_requested(self, turn: Turn, event: e.LookupRequested) -> None:
        """The scheduler asks how many tokens can be loaded."""

    def blocks_allocated(self, turn: Turn, event: e.BlocksAllocated) -> None:
        """The scheduler gave the request blocks."""

    def request_preempted(self, turn: Turn, event: e.RequestPreempted) -> None:
        """The scheduler took the request's blocks. Until the next forward pass, their contents are intact."""

    def session_continued(self, turn: Turn, event: e.SessionContinued) -> None:
        """A streaming session continues with its next turn."""

    def tokens_rolled_back(self, turn: Turn, event: e.TokensRolledBack) -> None:
        """The scheduler counts fewer computed tokens for the request than before."""

    def request_finished(self, turn: Turn, event: e.RequestFinished) -> None:
        """The request ended. The contents of its blocks are intact until the next forward pass."""

    def extension_observed(self, turn: Turn, event: e.ExtensionObserved) -> None:
        """An extension made an observation about the request. `Extension.payload_of` decodes the observation."""

    def tokens_scheduled(self, turn: Turn) -> None:
        """A step schedules tokens of the request. Not called if the request decodes one more token, as expected."""

    def tokens_settled(self, turn: Turn, first_chunk: int, num_settled_tokens: int) -> None:
        """More chunks of the request are settled, from `first_chunk` on."""

    def transfer_settled(self, turn: Turn, job: Copy) -> None:
        """A copy of the request completed or failed."""


class Unfinished(StateHandler):
    """A request that has not ended. Settled chunks are saved when it ends."""

    def request_finished(self, turn: Turn, event: e.RequestFinished) -> None:
        """Save settled chunks that are not saved yet. Release the request if it has no copy in flight.

        A waiting request may have unsaved chunks too: a step may have computed them before the request's load was
        reported.
        """
        save_on_finish(turn, event)
        release_if_settled(turn)


class Waiting(Unfinished):
    """A request that waits for blocks. It is offered tokens of the host pool, and loads them when it gets blocks."""

    awaits_saves: ClassVar[bool] = True
    """Whether a lookup is deferred while a save in flight would extend the hit."""

    def lookup_requested(self, turn: Turn, event: e.LookupRequested) -> None:
        """Answer the lookup, or ask the scheduler to repeat it later."""
        turn.decide(answer_lookup(turn, event, awaits_saves=self.awaits_saves))

    def blocks_allocated(self, turn: Turn, event: e.BlocksAllocated) -> None:
        """Issue the load of the tokens that the allocation claims."""
        load_what_was_answered(turn, event)


class Computing(Unfinished):
    """A request that has blocks. Its chunks are saved when they settle, and when it loses its blocks."""

    def tokens_settled(self, turn: Turn, first_chunk: int, num_settled_tokens: int) -> None:
        """Save the settled chunks."""
        save_settled(turn, first_chunk, num_settled_tokens)

    def request_preempted(self, turn: Turn, event: e.RequestPreempted) -> None:
        """Save settled tokens from the lost blocks before the next forward pass overwrites these blocks."""
        save_on_preemption(turn, event)

    def session_continued(self, turn: Turn, event: e.SessionContinued) -> None:
        """Make the next step wait for saves from blocks that the next step may overwrite."""
        fence_saves(turn)

    def tokens_rolled_back(self, turn: Turn, event: e.TokensRolledBack) -> None:
        """Make the next step wait for saves from blocks that the next step may overwrite."""
        fence_saves(turn)


class New(Waiting):
    """A request without computed tokens. It has nothing to save, and its lookups do not wait for saves in flight."""

    state = RequestState.NEW
    awaits_saves = False

    def tokens_scheduled(self, turn: Turn) -> None:
        """Record the progress of the request's prefill."""
        report_progress(turn)

    def transfer_settled(self, turn: Turn, job: Copy) -> None:
        """Record the progress of the prefill, because the request's load may have arrived."""
        report_progress(turn)


class ChunkedPrefill(Computing):
    """A request of which some known tokens are not computed yet. Any step may complete the prefill."""

    state = RequestState.CHUNKED_PREFILL

    def blocks_allocated(self, turn: Turn, event: e.BlocksAllocated) -> None:
        """Refuse a claim of tokens that no lookup offered. An allocation for a session's next turn claims no tokens."""
        load_what_was_answered(turn, event)

    def tokens_scheduled(self, turn: Turn) -> None:
        """Record the progress of the request's prefill."""
        report_progress(turn)


class Running(Computing):
    """A request of which every known token is computed or in flight. Its prefill is complete."""

    state = RequestState.RUNNING


class Preempted(Waiting):
    """A request that lost its blocks. Saves from these blocks may be in flight."""

    state = RequestState.PREEMPTED


class Recovering(Waiting, Computing):
    """A preempted request that has blocks again, which a load or a recomputation fills.

    Lookups and allocations are handled as in `Waiting`, other observations as in `Computing`.
    """

    state = RequestState.RECOVERING

    def tokens_scheduled(self, turn: Turn) -> None:
        """Record the progress of the request's prefill."""
        report_progress(turn)

    def transfer_settled(self, turn: Turn, job: Copy) -> None:
        """Record the progress of the prefill, because the request's load may have arrived."""
        report_progress(turn)


class Finished(StateHandler):
    """A request that has ended. It is released when its last copy is settled."""

    state = RequestState.FINISHED

    def transfer_settled(self, turn: Turn, job: Copy) -> None:
        """Release the request if this was its last copy."""
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
    """Return what is wrong with the `state` of a handler or handler class, and what to write; empty if nothing is."""
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
"""Names of the methods that a handler may have."""
