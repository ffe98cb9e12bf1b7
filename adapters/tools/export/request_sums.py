"""What became of each request's tokens, as attributes of its span: found, computed again, missed, each with its reason.

It must not know of spans.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvledger.adapters.tools.logs.log import Batch, StoredLog
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.reasons import Accounts, RequestHistory


class RequestSums:
    """Keeps the accounts of a log; give it every batch, and take out each request when it is over."""

    def __init__(self, log: StoredLog, selection: Selection) -> None:
        self._accounts = Accounts(log.configuration, request_id=selection.request_id, on_end=self._end)
        self._ended: dict[int, RequestHistory] = {}
        """By ordinal, in the last batch: who is not shown then never will be."""
        self._open: dict[int, RequestHistory] | None = None
        """The same of those that are not over, as of the last batch; None: not asked for."""

    def take(self, batch: Batch) -> None:
        """Take up the next batch of the log."""
        self._ended.clear()
        self._open = None
        if batch.gap is not None:
            self._accounts.lose()
        for sequence, event in batch.numbered():
            self._accounts.take(sequence, event)

    def attributes_of(self, ordinal: int) -> Mapping[str, int]:
        """Of a request that is shown for the last time."""
        history = self._ended.pop(ordinal, None)
        if history is None:
            if self._open is None:
                self._open = {each.ordinal: each for each in self._accounts.histories}
            history = self._open.get(ordinal)
        if history is None:
            return {}
        sums = history.sums
        return {
            "kvledger.num_tokens_recomputed": sums.num_recomputed,
            "kvledger.num_tokens_missed": sums.num_missed(),
            **{f"kvledger.recomputed.{reason}": count for reason, count in sorted(sums.recomputed.items()) if count},
            **{f"kvledger.missed.{reason}": count for reason, count in sorted(sums.misses().items()) if count},
        }

    def _end(self, history: RequestHistory) -> None:
        self._ended[history.ordinal] = history
