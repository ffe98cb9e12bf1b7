"""Whether a request's known tokens are all computed or in flight."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.states import BlocksRegion
from kvledger.lifecycle.turn import Turn


def report_progress(turn: Turn) -> None:
    """Record how far the request is, unless its load has not arrived or nothing was scheduled yet."""
    record, projections = turn.record, turn.projections
    num_computed_tokens = projections.tracker.num_computed_tokens(record)
    if num_computed_tokens and record.blocks is not BlocksRegion.LOADING:
        event_class = e.PrefillCompleted if num_computed_tokens >= record.num_tokens else e.PrefillAdvanced
        turn.decide(event_class(*record.life, num_computed_tokens, record.num_tokens, turn.cause))
