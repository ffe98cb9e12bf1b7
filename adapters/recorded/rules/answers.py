"""What vLLM may be answered, as its scheduler takes it."""

from __future__ import annotations

from kvledger.adapters.recorded.payloads import LookupReturned
from kvledger.lifecycle import on
from kvledger.lifecycle.audit import Checker


class LastToken(Checker):
    """LAST_TOKEN: loaded and locally cached tokens leave the engine something to compute.

    Verifies: no answer is negative; with what is computed it is at most the tokens that are known, which is what
    vLLM's scheduler asserts, and one less where the load precedes the step, which computes the last one
    (`v1/core/sched/scheduler.py`, 0.32); an answer of no tokens does not promise to come asynchronously
    (`kv_connector/v1/base.py`, get_num_new_matched_tokens).
    Does not verify: that what was answered is there.
    """

    rule = "LAST_TOKEN"

    @on(LookupReturned)
    def _answered(self, lookup: LookupReturned) -> None:
        answer = lookup.num_external_tokens
        if answer is None:
            return
        most = lookup.num_tokens - lookup.num_computed_tokens - (not lookup.is_async)
        if answer < 0 or answer > max(most, 0):
            detail = f"{answer} tokens were answered, {lookup.num_computed_tokens} of {lookup.num_tokens} are computed"
        elif lookup.is_async and not answer:
            detail = "no tokens were answered, asynchronously"
        else:
            return
        self.broken(detail)
