"""Why tokens were missed and computed again, as a section of a page: the table of reasons, and one request's causes.

The reasons themselves are found in `kvledger.adapters.reasons` and told as `kvledger why` tells them.
"""

from __future__ import annotations

from kvledger.adapters.export.markup import cell, element, escaped, table
from kvledger.adapters.logs import stories
from kvledger.adapters.logs.amounts import milliseconds, plural
from kvledger.adapters.logs.explanation import Cause, Chain
from kvledger.adapters.logs.log import StoredLog
from kvledger.adapters.logs.progress import Progress
from kvledger.adapters.logs.reason_text import MEANINGS
from kvledger.adapters.logs.selection import Selection
from kvledger.adapters.reasons import BY_DESIGN, Accounts, LoadFate, Reason, Sums
from kvledger.lifecycle.events import Event

_MAX_CAUSES = 400
"""Of one life that are told."""


class Reasons:
    """Keeps the accounts of the selected part of a log while it is told; give it every event in order."""

    def __init__(self, log: StoredLog, selection: Selection) -> None:
        self._selection = selection
        self._accounts = Accounts(log.configuration, request_id=selection.request_id)
        self._before: Sums | None = None
        self._expected = 1

    def take(self, sequence: int, event: Event) -> None:
        """Take up the next event of the log."""
        if self._before is None and sequence >= self._selection.first_sequence:
            self._before = self._accounts.sums()
        if sequence != self._expected:
            self._accounts.lose()
        self._expected = sequence + 1
        self._accounts.take(sequence, event)

    def sums(self) -> Sums:
        """Of the selected part."""
        sums = self._accounts.sums()
        return sums if self._before is None else sums.since(self._before)


def totals(sums: Sums) -> str:
    """The table of tokens by reason, and that it adds up."""
    misses = sums.misses()
    again = sums.recomputed + sums.computed_twice
    found = [reason for reason in Reason if misses[reason] or again[reason]]
    found.sort(key=lambda reason: (reason in BY_DESIGN, -again[reason], -misses[reason]))
    if not found:
        return "<p>No tokens were left to compute in this part of the log.</p>\n"
    rows = [
        cell(reason.value, "state")
        + cell(f"{misses[reason]:,}", "number")
        + cell(f"{again[reason]:,}", "number")
        + cell(MEANINGS[reason])
        for reason in found
    ]
    rows.append(cell("all") + cell(f"{misses.total():,}", "number") + cell(f"{again.total():,}", "number") + cell(""))
    head: list[tuple[str, str | None]] = [
        ("reason", None),
        ("left to compute", "number"),
        ("computed again", "number"),
        ("what it means", None),
    ]
    loaded, under_way = sums.to_load[LoadFate.LOADED], sums.to_load[LoadFate.UNDER_WAY]
    coming = f" + {under_way:,} still to be loaded" if under_way else ""
    balance = (
        f"{sums.num_needed:,} tokens at {plural(sums.num_admissions, 'admission')} = {sums.num_retained:,} from vLLM's "
        f"prefix cache + {loaded:,} loaded{coming} + {misses.total():,} left to compute"
    )
    wrong = "".join(
        f'<p class="bad">This does not add up, which is a fault of kvledger: {escaped(difference)}</p>\n'
        for difference in sums.differences()
    )
    return table(head, rows) + f'<p class="dim">{escaped(balance)}</p>\n{wrong}'


def causes(log: StoredLog, selection: Selection, request_id: str, output: Progress) -> str:
    """The chain of causes of each life of a request, as `kvledger why` tells it."""
    told = stories.tell(log, selection, request_id, output)
    parts = []
    for number, story in enumerate(told.stories, 1):
        chain = Chain(story, told, log.core, log.configuration).causes()
        chosen = [cause for cause in chain if cause.last_sequence >= selection.first_sequence]
        if len(told.stories) > 1:
            parts.append(f"<h3>life {number} of {len(told.stories)}</h3>\n")
        head: list[tuple[str, str | None]] = [("ms", "number"), ("events", "number"), ("what happened, and why", None)]
        parts.append(table(head, [_row(cause) for cause in chosen[:_MAX_CAUSES]]))
        if len(chosen) > _MAX_CAUSES:
            more = f"{len(chosen) - _MAX_CAUSES:,} more; kvledger why has them"
            parts.append(f"<p>… and {escaped(more)}</p>\n")
    return "".join(parts)


def _row(cause: Cause) -> str:
    last = "" if cause.sequence == cause.last_sequence else f"–{cause.last_sequence}"
    reasons = "".join(element("div", escaped(reason), class_="reason") for reason in (*cause.reasons, *cause.notes))
    text = element("td", escaped(cause.text) + reasons)
    return cell(milliseconds(cause.time_ns), "number") + cell(f"{cause.sequence}{last}", "number") + text
