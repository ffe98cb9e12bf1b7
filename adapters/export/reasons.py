"""Why tokens were missed and computed again, for a page: sums of the selected part, and one request's causes."""

from __future__ import annotations

from kvledger.adapters.logs import stories
from kvledger.adapters.logs.amounts import plural
from kvledger.adapters.logs.explanation import Cause, Chain
from kvledger.adapters.logs.log import Batch, StoredLog
from kvledger.adapters.logs.progress import Progress
from kvledger.adapters.logs.reason_text import MEANINGS
from kvledger.adapters.logs.selection import Selection
from kvledger.adapters.reasons import BY_DESIGN, Accounts, LoadFate, Reason, Sums


class Reasons:
    """Keeps the accounts of the selected part of a log; give it every batch in order."""

    def __init__(self, log: StoredLog, selection: Selection) -> None:
        self._first_sequence = selection.first_sequence
        self._accounts = Accounts(log.configuration, request_id=selection.request_id)
        self._before: Sums | None = None

    def take(self, batch: Batch) -> None:
        """Take up the next batch of the log."""
        if batch.gap is not None:
            self._accounts.lose()
        for sequence, event in batch.numbered():
            if self._before is None and sequence >= self._first_sequence:
                self._before = self._accounts.sums()
            self._accounts.take(sequence, event)

    def sums(self) -> Sums:
        """Of the selected part."""
        sums = self._accounts.sums()
        return sums if self._before is None else sums.since(self._before)


def totals(sums: Sums) -> dict[str, object]:
    """The table of tokens by reason, and that it adds up."""
    misses = sums.misses()
    again = sums.recomputed + sums.computed_twice
    found = [reason for reason in Reason if misses[reason] or again[reason]]
    found.sort(key=lambda reason: (reason in BY_DESIGN, -again[reason], -misses[reason]))
    rows = [(reason.value, misses[reason], again[reason], MEANINGS[reason]) for reason in found]
    loaded, under_way = sums.to_load[LoadFate.LOADED], sums.to_load[LoadFate.UNDER_WAY]
    coming = f" + {under_way:,} still to be loaded" if under_way else ""
    coming += f" + {sums.num_elsewhere:,} from elsewhere" if sums.num_elsewhere else ""
    return {
        "reasons": [*rows, ("all", misses.total(), again.total(), "")] if rows else [],
        "balance": (
            f"{sums.num_needed:,} tokens at {plural(sums.num_admissions, 'admission')} = {sums.num_retained:,} from "
            f"vLLM's prefix cache + {loaded:,} loaded{coming} + {misses.total():,} left to compute"
        ),
        "differences": sums.differences(),
    }


def causes(log: StoredLog, selection: Selection, request_id: str, output: Progress) -> list[list[Cause]]:
    """The chain of causes of each incarnation of a request, as `kvledger why` shows it."""
    told = stories.tell(log, selection, request_id, output)
    chains = [Chain(story, told, log.core, log.configuration).causes() for story in told.stories]
    return [[cause for cause in chain if cause.last_sequence >= selection.first_sequence] for chain in chains]
