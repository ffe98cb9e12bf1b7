"""Reads a stored log and tells it, whole or in part; what cannot be folded ends the telling, not the command."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvledger.adapters.export.chronicle import Chronicle
from kvledger.adapters.export.excerpt import Excerpt
from kvledger.adapters.export.records import Listener
from kvledger.adapters.logs.amounts import plural
from kvledger.adapters.logs.log import StoredLog
from kvledger.adapters.logs.selection import Selection
from kvledger.lifecycle import Projections, SequencedEvent
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit

Remark = Callable[[str], None]
Take = Callable[[int, e.Event], None]


def tell(
    log: StoredLog,
    selection: Selection,
    listener: Listener,
    remark: Remark,
    *,
    audit: Audit | None = None,
    also: Take | None = None,
) -> Chronicle:
    """Read the log from its beginning and tell the listener of the selected part.

    Args:
        log: the opened log.
        selection: what is selected of it.
        listener: whom to tell.
        remark: told, in a sentence, what the reader of the result should know.
        audit: holds the rules against the events before the first gap, in the same reading.
        also: given each event before it is told.
    """
    excerpt = Excerpt(listener, selection)
    chronicle = Chronicle(Projections(log.core, log.configuration) if audit is None else audit.projections, excerpt)
    expected, is_first = 1, True
    current: SequencedEvent | None = None

    def take(sequence: int, event: e.Event) -> None:
        nonlocal expected, is_first, current
        current = sequence, event
        if sequence != expected:
            chronicle.lose(expected, sequence - 1, is_retired=is_first)
        expected, is_first = sequence + 1, False
        excerpt.reach(sequence)
        if also is not None:
            also(sequence, event)
        chronicle.take(sequence, event)

    is_whole = True
    for frame in log.frames():
        events = [(sequence, event) for sequence, event in frame if not selection.is_over(sequence)]
        is_whole = not selection.is_over(log.last_sequence)
        error = _take_frame(events, take, audit if log.last_sequence <= log.trusted_sequence else None)
        if error and current is not None:  # what was told before it is still worth having
            sequence, event = current
            remark(f"event {sequence} ({event.id}) cannot be folded: {error}; what follows is left out")
            is_whole = False
        if not is_whole:
            break
    if audit is not None and is_whole:
        audit.finish()
    chronicle.finish()
    _remark_on(log, remark)
    return chronicle


def _take_frame(events: Sequence[SequencedEvent], take: Take, audit: Audit | None) -> str:
    """Tell these events, by way of an audit if there is one; what cannot be folded ends it with a reason."""
    if audit is not None:
        audit.take_frame(events, around=take)
        return "" if audit.unfoldable is None else audit.unfoldable.error
    try:
        for sequence, event in events:
            take(sequence, event)
    except OSError:  # of whoever is told: its file cannot be written
        raise
    except Exception as error:  # noqa: BLE001 -- whatever it is, a log must not end the command
        return repr(error)
    return ""


def _remark_on(log: StoredLog, remark: Remark) -> None:
    for event_id, count in sorted(log.skipped.items()):
        remark(f"{plural(count, 'event')} of the kind {event_id}, which this version does not know, were left out")
    for damage in log.damage:
        remark(f"{damage.kind} in {damage.segment} at byte {damage.offset}: {damage.detail}")
