"""Tokens that each request missed and computed again, by reason, as attributes for the request's span.

This module must not depend on spans.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.reasons import Accounts, RequestHistory
from kvledger.lifecycle.reader import Model


class RequestSums(Accounts):
    """Counts the tokens of each request by reason.

    Call `attributes_of` at the event that ends the request, or at the end of the log. A reader must call this visitor
    before the visitors that call `attributes_of`.
    """

    def __init__(self, model: Model, selection: Selection) -> None:
        super().__init__(model, request_id=selection.request_id, on_end=self._keep)
        self._asked: Mapping[int, RequestHistory] = {}
        """Ordinal → history of the life that has just ended; at the end of the log, of each life that has not ended."""

    def finish(self) -> None:
        """Keep the histories of the lives that have not ended."""
        self._asked = {each.ordinal: each for each in self.histories}

    def attributes_of(self, ordinal: int) -> Mapping[str, int]:
        """Return attribute → number of tokens, for a life that has just ended or, at the log's end, is still open."""
        history = self._asked.get(ordinal)
        if history is None:
            return {}
        sums = history.sums
        return {
            "kvledger.num_tokens_recomputed": sums.num_recomputed,
            "kvledger.num_tokens_missed": sums.num_missed(),
            **{f"kvledger.recomputed.{reason}": count for reason, count in sorted(sums.recomputed.items()) if count},
            **{f"kvledger.missed.{reason}": count for reason, count in sorted(sums.misses().items()) if count},
        }

    def _keep(self, history: RequestHistory) -> None:
        self._asked = {history.ordinal: history}
