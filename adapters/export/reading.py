"""Reads a stored log, whole or in part, into a trace; what cannot be folded ends the reading, not the command."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvledger.adapters.export.spans import Visitor
from kvledger.adapters.export.trace import Trace
from kvledger.adapters.logs.amounts import plural
from kvledger.adapters.logs.log import StoredLog
from kvledger.adapters.logs.selection import Selection
from kvledger.lifecycle import Projections, SequencedEvent
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit

Remark = Callable[[str], None]
Take = Callable[[int, e.Event], None]


def read_trace(
    log: StoredLog,
    selection: Selection,
    visitor: Visitor,
    remark: Remark,
    *,
    audit: Audit | None = None,
    also: Take | None = None,
) -> Trace:
    """Read the log from its beginning and show the visitor the selected part.

    Args:
        log: the opened log.
        selection: what is selected of it.
        visitor: who is shown it.
        remark: given, in a sentence, what the reader of the result should know.
        audit: holds the rules against the events before the first gap, in the same reading.
        also: given each event before the trace takes it.
    """
    trace = Trace(Projections(log.core, log.configuration) if audit is None else audit.projections, visitor, selection)
    expected, is_first = 1, True
    current: SequencedEvent | None = None

    def take(sequence: int, event: e.Event) -> None:
        nonlocal expected, is_first, current
        current = sequence, event
        if sequence != expected:
            trace.take_gap(expected, sequence - 1, is_trouble=not is_first)
        expected, is_first = sequence + 1, False
        if also is not None:
            also(sequence, event)
        trace.take(sequence, event)

    is_whole = True
    for frame in log.frames():
        events = [(sequence, event) for sequence, event in frame if not selection.is_over(sequence)]
        is_whole = not selection.is_over(log.last_sequence)
        error = _take_frame(events, take, audit if log.last_sequence <= log.trusted_sequence else None)
        if error and current is not None:  # what was read before it is still worth having
            sequence, event = current
            remark(f"event {sequence} ({event.id}) cannot be folded: {error}; what follows is left out")
            is_whole = False
        if not is_whole:
            break
    if audit is not None and is_whole:
        audit.finish()
    trace.finish()
    for event_id, count in sorted(log.skipped.items()):
        remark(f"{plural(count, 'event')} of the kind {event_id}, which this version does not know, were left out")
    for damage in log.damage:
        remark(f"{damage.kind} in {damage.segment} at byte {damage.offset}: {damage.detail}")
    return trace


def _take_frame(events: Sequence[SequencedEvent], take: Take, audit: Audit | None) -> str:
    """Take these events, by way of an audit if there is one; what cannot be folded ends it with a reason."""
    if audit is not None:
        audit.take_frame(events, around=take)
        return "" if audit.unfoldable is None else audit.unfoldable.error
    try:
        for sequence, event in events:
            take(sequence, event)
    except OSError:  # of a visitor: its file cannot be written
        raise
    except Exception as error:  # noqa: BLE001 -- whatever it is, a log must not end the command
        return repr(error)
    return ""
