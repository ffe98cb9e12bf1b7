"""What a recorded connector adds to the core: its answers as events, and handlers that turn them into decisions.

Observations are the standard core's and precede the call that they are about. The connector's answer follows it, as an
event of this extension, and leads to the standard decision with the same content. So lifecycle, tables and tools treat
such a log like kvledger's own. It must not know vLLM, nor any connector.
"""

from __future__ import annotations

from kvledger.adapters.recorded import payloads
from kvledger.adapters.recorded.rules import LEFT_OUT, RULES
from kvledger.adapters.recorded.words import InWords
from kvledger.lifecycle import (
    MissReason,
    RequestState,
    StateHandler,
    Turn,
    decisions,
)
from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT

_UNKNOWN = MissReason.RECORDED.value


class Recorder(InWords):
    """The extension of a recorder's core."""

    rows = (
        # Why a wrapped connector keeps blocks is not known; that it does is why the request is still here.
        ("finished", "blocks.held", "finished.held"),
        ("finished.held", "recorder/sent", "finished"),
    )
    rules = RULES
    leaves_out = LEFT_OUT


def _release(turn: Turn) -> None:
    """Unless the connector keeps its blocks."""
    if not turn.record.sub:
        decisions.reports.release_if_settled(turn)


def _answer(turn: Turn, event: e.ExtensionObserved) -> None:
    """Decide what the connector has answered, in the core's events."""
    returned = Recorder.payload_of(event)
    if not isinstance(returned, payloads.LookupReturned):
        return
    record, asked = turn.record, (returned.num_computed_tokens, returned.num_tokens)
    if returned.num_external_tokens is None:
        in_a_row = record.num_deferrals + 1
        turn.decide(e.LookupDeferred(*record.life, *asked, 0, in_a_row, turn.cause))
    else:
        num_hit_tokens = returned.num_computed_tokens + returned.num_external_tokens
        answer = (num_hit_tokens, returned.num_external_tokens)
        turn.decide(e.LookupAnswered(*record.life, *asked, *answer, returned.is_async, _UNKNOWN, turn.cause))


def _load(turn: Turn, event: e.BlocksAllocated) -> None:
    """What vLLM accepts is loaded; from where only the connector knows."""
    answer = turn.record.claimed
    if not event.num_external_tokens or answer is None or answer.generation != turn.record.generation:
        return
    first_token, num_tokens = answer.num_computed_tokens, event.num_external_tokens
    pages = turn.projections.geometry.pages_spanning(first_token, num_tokens)
    block_ids = event.block_ids[pages.start : pages.stop]
    turn.decide(
        e.LoadIssued(
            *turn.record.life,
            turn.projections.jobs.next_job_id,
            first_token,
            num_tokens,
            (NO_SLOT,) * len(block_ids),
            block_ids,
            answer.is_async,
            turn.cause,
        )
    )


class Preempted(StateHandler):
    """Is looked up until there are blocks."""

    state = RequestState.PREEMPTED

    def extension_observed(self, turn: Turn, event: e.ExtensionObserved) -> None:
        """The connector has answered."""
        _answer(turn, event)

    def blocks_allocated(self, turn: Turn, event: e.BlocksAllocated) -> None:
        """With a load or without."""
        _load(turn, event)


class New(Preempted):
    """Is looked up, is given blocks, computes."""

    state = RequestState.NEW

    def tokens_scheduled(self, turn: Turn) -> None:
        """It computes."""
        decisions.reports.report_progress(turn)

    def transfer_settled(self, turn: Turn, _job: object) -> None:
        """Its load has come."""
        decisions.reports.report_progress(turn)


class ChunkedPrefill(StateHandler):
    """Computes; the next turn of a session is given blocks."""

    state = RequestState.CHUNKED_PREFILL

    def blocks_allocated(self, turn: Turn, event: e.BlocksAllocated) -> None:
        """With a load or without."""
        _load(turn, event)

    def tokens_scheduled(self, turn: Turn) -> None:
        """It computes."""
        decisions.reports.report_progress(turn)


class Running(StateHandler):
    """No progress is left to report."""

    state = RequestState.RUNNING


class Recovering(New):
    """Has blocks again; may be looked up before it computes."""

    state = RequestState.RECOVERING


class Finished(StateHandler):
    """Waits until the connector releases its blocks, and for its last load."""

    state = RequestState.FINISHED

    def extension_observed(self, turn: Turn, event: e.ExtensionObserved) -> None:
        """The connector has answered, or releases the blocks."""
        payload = Recorder.payload_of(event)
        if isinstance(payload, payloads.EndReturned) and payload.keeps_blocks:
            turn.decide(e.BlocksHeld(*turn.record.life, turn.cause))
        elif isinstance(payload, payloads.EndReturned | payloads.Sent):
            _release(turn)

    def transfer_settled(self, turn: Turn, _job: object) -> None:
        """Its load has come too late."""
        _release(turn)


Recorder.replaces = (New, ChunkedPrefill, Running, Preempted, Recovering, Finished)
