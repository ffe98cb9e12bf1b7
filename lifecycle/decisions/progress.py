"""Whether a request's known tokens are all computed or in flight."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.decisions import NOTHING, Decisions
from kvledger.lifecycle.projections.tracker import RequestRecord


def tell_progress(record: RequestRecord, projections: Projections, cause: int) -> Decisions:
    """Say how far the request is, unless its load has not arrived or nothing was scheduled yet."""
    num_computed_tokens = projections.tracker.num_computed_tokens(record)
    if not num_computed_tokens or projections.transfers.is_loading(record.ordinal):
        return NOTHING
    event_class = e.PrefillCompleted if num_computed_tokens >= record.num_tokens else e.PrefillAdvanced
    return iter((event_class(record.request_id, num_computed_tokens, record.num_tokens, cause),))
