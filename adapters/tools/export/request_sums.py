"""What became of each request's tokens, as attributes of its span: found, computed again, missed, each with its reason.

It must not know of spans.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.reasons import Accounts, RequestHistory
from kvledger.lifecycle.reader import Model


class RequestSums(Accounts):
    """The accounts of a log. Ask it for each request at the event that ends it, or at the end of the log.

    A reader must call it before whoever asks.
    """

    def __init__(self, model: Model, selection: Selection) -> None:
        super().__init__(model, request_id=selection.request_id, on_end=self._keep)
        self._asked: Mapping[int, RequestHistory] = {}
        """By ordinal: the life that has just ended; at the end of the log those that are not over."""

    def finish(self) -> None:
        """Lives that are not over may be asked for."""
        self._asked = {each.ordinal: each for each in self.histories}

    def attributes_of(self, ordinal: int) -> Mapping[str, int]:
        """Of a request that is shown for the last time."""
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
