"""Reads a stored log and tells it, whole or in part; what cannot be folded ends the telling, not the command."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvledger.adapters.cli.words import plural
from kvledger.adapters.export.chronicle import Chronicle
from kvledger.adapters.export.excerpt import Excerpt
from kvledger.adapters.export.records import Listener
from kvledger.adapters.reading.logs import StoredLog
from kvledger.adapters.reading.window import Window
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.replay import SequencedEvent

Remark = Callable[[str], None]
Take = Callable[[int, e.Event], None]


class _Unfoldable(Exception):
    """The audit met an event that today's code cannot fold."""


def tell(
    log: StoredLog,
    window: Window,
    listener: Listener,
    remark: Remark,
    *,
    audit: Audit | None = None,
    also: Take | None = None,
) -> Chronicle:
    """Read the log from its beginning and tell the listener of the selected part.

    Args:
        log: the opened log.
        window: what is selected of it.
        listener: whom to tell.
        remark: told, in a sentence, what the reader of the result should know.
        audit: holds the rules against the events before the first gap, in the same reading.
        also: given each event before it is told.
    """
    excerpt = Excerpt(listener, window)
    projections = Projections(log.configuration) if audit is None else audit.projections

    def fold(event: e.Event, sequence: int) -> None:
        if audit is None or sequence > log.trusted_sequence:
            projections.fold(event, sequence)
            return
        audit.take(sequence, event)
        if audit.unfoldable is not None:
            raise _Unfoldable(audit.unfoldable.error)

    chronicle = Chronicle(projections, excerpt, fold)
    is_whole = True
    for sequence, event in _with_gaps(log, chronicle):
        is_whole = not window.is_over(sequence)
        if not is_whole:
            break
        excerpt.reach(sequence)
        try:
            if also is not None:
                also(sequence, event)
            chronicle.take(sequence, event)
        except OSError:  # of whoever is told: its file cannot be written
            raise
        except Exception as error:  # noqa: BLE001 -- what was told before it is still worth having
            remark(f"event {sequence} ({event.id}) cannot be folded: {error!r}; what follows is left out")
            is_whole = False
            break
    if audit is not None and is_whole:
        audit.finish()
    chronicle.finish()
    _remark_on(log, remark)
    return chronicle


def _remark_on(log: StoredLog, remark: Remark) -> None:
    for event_id, count in sorted(log.skipped.items()):
        remark(f"{plural(count, 'event')} of the kind {event_id}, which this version does not know, were left out")
    for damage in log.damage:
        remark(f"{damage.kind} in {damage.segment} at byte {damage.offset}: {damage.detail}")


def _with_gaps(log: StoredLog, chronicle: Chronicle) -> Iterator[SequencedEvent]:
    expected, is_first = 1, True
    for sequence, event in log.events():
        if sequence != expected:
            chronicle.lose(expected, sequence - 1, is_retired=is_first)
        expected, is_first = sequence + 1, False
        yield sequence, event
