"""Reads a stored log, whole or in part, into a trace; what cannot be folded ends the reading, not the command."""

from __future__ import annotations

from collections.abc import Callable

from kvledger.adapters.tools.exit_codes import CommandFailed
from kvledger.adapters.tools.export.spans import Visitor
from kvledger.adapters.tools.export.trace import Trace
from kvledger.adapters.tools.logs.log import Batch, StoredLog
from kvledger.adapters.tools.logs.reading import begin_model
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.verification import Verification
from kvledger.adapters.units import plural


def read_trace(
    log: StoredLog,
    selection: Selection,
    visitor: Visitor,
    remark: Callable[[str], None],
    *,
    verification: Verification | None = None,
    also: Callable[[Batch], None] | None = None,
) -> Trace:
    """Read the log from its beginning and show the visitor the selected part.

    Args:
        log: the opened log.
        selection: what is selected of it.
        visitor: who is shown it.
        remark: given, in a sentence, what the reader of the result should know.
        verification: holds the rules against the log in the same reading.
        also: given each batch before the trace takes it.
    """
    model = begin_model(log)
    if verification is None:
        projections = log.start() or log.core.new_projections(log.configuration)
    else:
        projections = verification.audit.projections
    trace = Trace(log.core, model, projections, log.totals(projections), visitor, selection)
    error = ""
    for batch in log.batches(selection.last_sequence):
        error = _take(batch, trace, log, verification, also)
        if error:  # what was read before it is still worth having
            remark(f"{trace.current} cannot be folded: {error}; what follows is left out")
            break
    trace.finish()
    for event_id, count in sorted(log.skipped.items()):
        remark(f"{plural(count, 'event')} of the kind {event_id}, which this version does not know, were left out")
    for damage in log.damage:
        remark(str(damage))
    return trace


def _take(
    batch: Batch,
    trace: Trace,
    log: StoredLog,
    verification: Verification | None,
    also: Callable[[Batch], None] | None,
) -> str:
    """Take up a batch, by way of an audit where it is audited; the reason, where it cannot be folded."""
    try:
        if batch.gap is not None:
            trace.take_gap(batch.gap)
        if also is not None:
            also(batch)
        if log.last_sequence <= log.start_sequence:
            return ""  # it is in the snapshot
        if verification is not None and verification.take(batch, around=trace.take):
            unfoldable = verification.audit.unfoldable
            return "" if unfoldable is None else unfoldable.error
        for sequence, event in batch.numbered():
            trace.take(sequence, event)
    except (OSError, CommandFailed):  # of a visitor: what it writes to takes nothing
        raise
    except Exception as error:  # noqa: BLE001 -- whatever it is, a log must not end the command
        return repr(error)
    return ""
