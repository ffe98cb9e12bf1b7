"""Answers: what vLLM's scheduler accepts."""

from __future__ import annotations

from kvledger.adapters.recorded.payloads import LookupReturned
from kvledger.lifecycle import on
from kvledger.lifecycle.audit import Checker


class LastToken(Checker):
    """LAST_TOKEN: loaded and locally cached tokens leave the engine something to compute.

    Verifies: of every answer:

    - It is not negative.
    - With the computed tokens it is at most the known tokens, as vLLM's scheduler asserts, and one less if the load
      precedes the step, which computes the last one (`v1/core/sched/scheduler.py`, 0.32).
    - It is not asynchronous with no tokens (`kv_connector/v1/base.py`, get_num_new_matched_tokens).

    Does not verify: that the answered tokens are stored.
    """

    rule = "LAST_TOKEN"

    @on(LookupReturned)
    def _answered(self, lookup: LookupReturned) -> None:
        answer = lookup.num_external_tokens
        if answer is None:
            return
        most = lookup.num_tokens - lookup.num_computed_tokens - (not lookup.is_async)
        if answer < 0 or answer > max(most, 0):
            detail = f"the answer is {answer} tokens with {lookup.num_computed_tokens} of {lookup.num_tokens} computed"
        elif lookup.is_async and not answer:
            detail = "the answer is 0 tokens with an asynchronous load"
        else:
            return
        self.broken(detail)
