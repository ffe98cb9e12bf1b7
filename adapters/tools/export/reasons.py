"""Why tokens were missed or computed again, for the HTML page: counts by reason, and the causes of one request."""

from __future__ import annotations

from collections.abc import Callable

from kvledger.adapters.tools.logs.explanation import Cause, balance, causes_of, folded, sums_by_reason
from kvledger.adapters.tools.logs.histories import Histories
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.reasons import Accounts, RequestHistory, Sums
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Life, Model, Visits


class Reasons(Accounts):
    """Counts tokens by reason in the selected part of a log, and keeps the histories of the selected request.

    Args:
        model: the reader's model.
        selection: the selected part.
        explained: called with the history of each life when the life ends, or at the end of the log. If no request is
            selected, a history has only token counts.
    """

    def __init__(
        self, model: Model, selection: Selection, explained: Callable[[RequestHistory], None] | None = None
    ) -> None:
        self._selection = selection
        self._explained = explained
        self._ended: list[RequestHistory] = []
        self._before: Sums | None = None
        """Token counts before the selection; None until the selection begins."""
        one = selection.request_id
        super().__init__(model, request_id=one, on_end=self._keep, keeps_histories=one is not None)

    def visits(self) -> Visits:
        """Return which methods to call for which events: first `_reach`, then the methods of `Accounts`."""
        return [*((event_class, self._reach) for event_class in e.STANDARD_EVENTS.values()), *super().visits()]

    def ended(self, life: Life) -> None:
        """Count the tokens of the life. They count as selected if the current event is selected."""
        self._reach()
        super().ended(life)

    def finish(self) -> None:
        """Call `explained` with the histories of the lives that have not ended."""
        if self._explained is not None:
            for history in super().histories:
                self._explained(history)

    def sums(self) -> Sums:
        """Return the token counts of the selection: of its events and its request, or of the whole log."""
        sums = super().sums()
        return sums if self._before is None else sums.since(self._before)

    @property
    def histories(self) -> list[RequestHistory]:
        """Histories of the selected request's lives; empty if no request is selected."""
        return [] if self._selection.request_id is None else [*self._ended, *super().histories]

    def _reach(self, _event: e.Event | None = None) -> None:
        if self._before is None and self.moment.sequence >= self._selection.first_sequence:
            self._before = super().sums()

    def _keep(self, history: RequestHistory) -> None:
        if self._selection.request_id is not None:
            self._ended.append(history)
        if self._explained is not None:
            self._explained(history)


def totals(sums: Sums) -> dict[str, object]:
    """Return a mapping: `reasons` has rows of token counts by reason, `balance` is an equation of all tokens."""
    found = sums_by_reason(sums)
    rows = [(reason.value, missed, again, reason.meaning) for reason, missed, again in found]
    all_missed, all_again = sum(missed for _, missed, _ in found), sum(again for *_, again in found)
    return {
        "reasons": [*rows, ("all", all_missed, all_again, "")] if rows else [],
        "balance": balance(sums),
    }


def causes(log: StoredLog, selection: Selection, histories: Histories) -> list[list[Cause]]:
    """Return the causes of each life of a request, as `kvledger why` shows them."""
    chains = [folded(causes_of(each, histories, log)) for each in histories.of_lives]
    return [[cause for cause in chain if cause.last_sequence >= selection.first_sequence] for chain in chains]
