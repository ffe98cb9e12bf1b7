"""Answers: what vLLM's scheduler accepts."""

from __future__ import annotations

from kvledger.adapters.recorded.payloads import LookupReturned
from kvledger.lifecycle import on
from kvledger.lifecycle.audit import Checker


class LastToken(Checker):
    """LAST_TOKEN: an answer offers at most the uncomputed tokens, and a load within a step leaves one to compute.

    Verifies: for every answer:

    - The number of offered tokens is not negative.
    - The offered and the computed tokens together are at most as many as the request's tokens, as vLLM's scheduler
      asserts. If the load is not asynchronous, at least one token of the request is neither offered nor computed,
      because the step must compute the last token (`v1/core/sched/scheduler.py`, 0.32).
    - If the load is asynchronous, the answer offers at least one token (`kv_connector/v1/base.py`,
      get_num_new_matched_tokens).

    Does not verify: that the offered tokens are stored.
    """

    rule = "LAST_TOKEN"

    @on(LookupReturned)
    def _answered(self, lookup: LookupReturned) -> None:
        answer = lookup.num_external_tokens
        if answer is None:
            return
        most = lookup.num_tokens - lookup.num_computed_tokens - (not lookup.is_async)
        if answer < 0 or answer > max(most, 0):
            detail = (
                f"the answer is {answer} tokens, with {lookup.num_computed_tokens} of the request's "
                f"{lookup.num_tokens} tokens computed"
            )
        elif lookup.is_async and not answer:
            detail = "the answer is 0 tokens with an asynchronous load"
        else:
            return
        self.broken(detail)
