"""Why tokens were missed and computed again, for a page: sums of the selected part, and one request's causes."""

from __future__ import annotations

from collections.abc import Callable

from kvledger.adapters.tools.logs.explanation import Cause, balance, causes_of, sums_by_reason
from kvledger.adapters.tools.logs.histories import Histories
from kvledger.adapters.tools.logs.log import Batch, StoredLog
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.reasons import Accounts, RequestHistory, Sums


class Reasons:
    """Keeps the accounts of the selected part of a log, and the history of one request; give it every batch."""

    def __init__(
        self, log: StoredLog, selection: Selection, explained: Callable[[RequestHistory], None] | None = None
    ) -> None:
        """Begin with nothing; `explained` is given each life of a request, its sums at least."""
        self._request_id = selection.request_id
        self._first_sequence = selection.first_sequence
        self._explained = explained
        self._ended: list[RequestHistory] = []
        self._accounts = Accounts(
            log.configuration,
            request_id=self._request_id,
            on_end=self._end,
            keeps_histories=self._request_id is not None,
        )
        self._before: Sums | None = None

    def take(self, batch: Batch) -> None:
        """Take up the next batch of the log."""
        if batch.gap is not None:
            self._accounts.lose()
        for sequence, event in batch.numbered():
            if self._before is None and sequence >= self._first_sequence:
                self._before = self._accounts.sums()
            self._accounts.take(sequence, event)

    def finish(self) -> None:
        """The log was read to its end: what is known of lives that are not over is told, too."""
        if self._explained is not None:
            for history in self._accounts.histories:
                self._explained(history)

    def _end(self, history: RequestHistory) -> None:
        if self._request_id is not None:
            self._ended.append(history)
        if self._explained is not None:
            self._explained(history)

    def sums(self) -> Sums:
        """Of the selected part."""
        sums = self._accounts.sums()
        return sums if self._before is None else sums.since(self._before)

    @property
    def histories(self) -> list[RequestHistory]:
        """Of the incarnations of the selected request, if one is selected."""
        return [] if self._request_id is None else [*self._ended, *self._accounts.histories]


def totals(sums: Sums) -> dict[str, object]:
    """The table of tokens by reason, and that it adds up."""
    found = sums_by_reason(sums)
    rows = [(reason.value, missed, again, reason.meaning) for reason, missed, again in found]
    all_missed, all_again = sum(missed for _, missed, _ in found), sum(again for *_, again in found)
    return {
        "reasons": [*rows, ("all", all_missed, all_again, "")] if rows else [],
        "balance": balance(sums),
        "differences": sums.differences(),
    }


def causes(log: StoredLog, selection: Selection, histories: Histories) -> list[list[Cause]]:
    """The chain of causes of each incarnation of a request, as `kvledger why` shows it."""
    chains = [causes_of(each, histories, log.core, log.configuration) for each in histories.of_incarnations]
    return [[cause for cause in chain if cause.last_sequence >= selection.first_sequence] for chain in chains]
