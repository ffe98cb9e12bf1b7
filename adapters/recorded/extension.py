"""Adds a recorded connector's answers to the core: as events, and by handlers that turn these events into decisions.

A hook call is recorded as one of the core's observations. The connector's answer follows as an event of this extension.
A handler then makes the core's decision with the same content. Tools can therefore read the log like a log of
kvledger's own connector. This module must not know vLLM or any connector.
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
from kvledger.lifecycle.ranges import MAX_INT64

_UNKNOWN = MissReason.RECORDED.value


class Recorder(InWords):
    """The extension that turns the standard core into a recorder's core."""

    rows = (
        # The log does not have the reason why a connector keeps blocks.
        ("finished", "blocks.held", "finished.held"),
        ("finished.held", "recorder/sent", "finished"),
    )
    rules = RULES
    leaves_out = LEFT_OUT


def _release(turn: Turn) -> None:
    """Release the request unless the connector keeps its blocks."""
    if not turn.record.sub:
        decisions.reports.release_if_settled(turn)


def _answer(turn: Turn, event: e.ExtensionObserved) -> None:
    """Record the connector's answer as the core's decision."""
    returned = Recorder.payload_of(event)
    if not isinstance(returned, payloads.LookupReturned):
        return
    record, asked = turn.record, (returned.num_computed_tokens, returned.num_tokens)
    if returned.num_external_tokens is None:
        in_a_row = record.num_deferrals + 1
        turn.decide(e.LookupDeferred(*record.life, *asked, 0, in_a_row, turn.cause))
    else:
        num_hit_tokens = min(returned.num_computed_tokens + returned.num_external_tokens, MAX_INT64)
        answer = (num_hit_tokens, returned.num_external_tokens)
        turn.decide(e.LookupAnswered(*record.life, *asked, *answer, returned.is_async, _UNKNOWN, turn.cause))


def _load(turn: Turn, event: e.BlocksAllocated) -> None:
    """Record the load that vLLM claimed. Its slots are unknown, because only the connector knows where the KV is.

    A claim fills no block, and is therefore no load, if its number of tokens is zero or negative, or if the request's
    table has no blocks for the tokens.
    """
    answer = turn.record.claimed
    if event.num_external_tokens <= 0 or answer is None or answer.generation != turn.record.generation:
        return
    first_token, num_tokens = answer.num_computed_tokens, event.num_external_tokens
    pages = turn.projections.geometry.pages_spanning(first_token, num_tokens)
    block_ids = event.block_ids[max(pages.start, 0) : max(pages.stop, 0)]
    if not block_ids:
        return
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
    """Handler of a preempted request, which vLLM looks up until the request gets blocks."""

    state = RequestState.PREEMPTED

    def extension_observed(self, turn: Turn, event: e.ExtensionObserved) -> None:
        """Record the connector's answer."""
        _answer(turn, event)

    def blocks_allocated(self, turn: Turn, event: e.BlocksAllocated) -> None:
        """Record the load, if vLLM claimed one."""
        _load(turn, event)


class New(Preempted):
    """Handler of a new request. vLLM looks it up, gives it blocks and computes its tokens."""

    state = RequestState.NEW

    def tokens_scheduled(self, turn: Turn) -> None:
        """Report progress."""
        decisions.reports.report_progress(turn)

    def transfer_settled(self, turn: Turn, _job: object) -> None:
        """Record how far the request's prefill has come after the load."""
        decisions.reports.report_progress(turn)


class ChunkedPrefill(StateHandler):
    """Handler of a request that computes its prompt. A session's next turn also gets its blocks in this state."""

    state = RequestState.CHUNKED_PREFILL

    def blocks_allocated(self, turn: Turn, event: e.BlocksAllocated) -> None:
        """Record the load, if vLLM claimed one."""
        _load(turn, event)

    def tokens_scheduled(self, turn: Turn) -> None:
        """Report progress."""
        decisions.reports.report_progress(turn)


class Running(StateHandler):
    """Handler of a request that decodes. Its prefill is complete, so no progress is recorded."""

    state = RequestState.RUNNING


class Recovering(New):
    """Handler of a request that has blocks again after a preemption, and may be looked up before it computes."""

    state = RequestState.RECOVERING


class Finished(StateHandler):
    """Handler of a finished request whose blocks the connector keeps, or whose load has not ended."""

    state = RequestState.FINISHED

    def extension_observed(self, turn: Turn, event: e.ExtensionObserved) -> None:
        """If the connector keeps the blocks, record that they are held. Otherwise release the request."""
        payload = Recorder.payload_of(event)
        if isinstance(payload, payloads.EndReturned) and payload.keeps_blocks:
            turn.decide(e.BlocksHeld(*turn.record.life, turn.cause))
        elif isinstance(payload, payloads.EndReturned | payloads.Sent):
            _release(turn)

    def transfer_settled(self, turn: Turn, _job: object) -> None:
        """Release the request after its last load."""
        _release(turn)


Recorder.replaces = (New, ChunkedPrefill, Running, Preempted, Recovering, Finished)
