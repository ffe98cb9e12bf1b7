"""Reads a stored log and calls a sink with the log's spans and instants."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvledger.adapters.tools.export.spans import Sink
from kvledger.adapters.tools.export.trace import Trace
from kvledger.adapters.tools.logs.log import Batch, Place, StoredLog
from kvledger.adapters.tools.logs.reading import begin_totals, take_batch
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.units import plural
from kvledger.lifecycle.reader import Model, Reader, Visitor


def read_trace(
    log: StoredLog,
    model: Model,
    selection: Selection,
    sink: Sink,
    remark: Callable[[str], None],
    *also: Callable[[Batch], object],
    visitors: Sequence[Visitor[Model]] = (),
    end: Place | None = None,
) -> Trace:
    """Read the log from its beginning and call the sink for the selected part.

    Args:
        log: the opened log.
        model: as `begin_model` returns it.
        selection: the selected part.
        sink: called with the spans and instants of the selected part.
        remark: called with remarks for the user, one sentence each.
        also: functions that are called with each batch, before the trace gets the batch.
        visitors: called with each event, before the trace gets the event.
        end: where to stop reading; None: at the end that the log has now.
    """
    trace = Trace(model, log.core, begin_totals(log, model), sink, selection)
    reader = Reader(model, [*visitors, *trace.visitors], needs=trace.also_needs)
    if log.start_sequence:
        for visitor in (*visitors, trace):
            visitor.lost(1, log.start_sequence)
    for batch in log.batches_so_far(selection.last_sequence, end):
        for take in also:
            take(batch)
        take_batch(reader, log, batch)
    reader.finish()
    for event_id, count in sorted(log.skipped.items()):
        remark(f"{plural(count, 'event')} of the kind {event_id}, which this version does not know, were left out")
    for damage in log.damage:
        remark(str(damage))
    return trace
