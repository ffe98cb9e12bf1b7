"""`kvledger stats`: sum up what the cache did, how long copies took, tokens per reason, and log bytes per event."""

from __future__ import annotations

from typing import Annotated, Literal

import attrs
from cyclopts import Parameter

from kvledger.adapters.tools.cli.finding import selected
from kvledger.adapters.tools.cli.options import NO_EXTENSIONS, Extending, Reading
from kvledger.adapters.tools.cli.output import Output, Written, show_ending
from kvledger.adapters.tools.cli.pool_sizes import show_pool_sizes
from kvledger.adapters.tools.cli.statistics import Counting, Statistics
from kvledger.adapters.tools.cli.why import show_advice, show_total, total
from kvledger.adapters.tools.exit_codes import ExitCode, gravest
from kvledger.adapters.tools.logs.coverage import readable
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.logs.reading import take_batch
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.reasons import advice
from kvledger.adapters.units import duration, plural, size
from kvledger.lifecycle.reader import Model, Reader, Spent

_NS_PER_S = 1_000_000_000


_COLUMNS = {"event": "left", "events": "right", "bytes": "right", "share of bytes": "right"}


def run(
    reading: Reading,
    *,
    sort: Annotated[
        Literal["bytes", "event", "events"], Parameter(help="sort the table of events by this column")
    ] = "bytes",
    extending: Extending = NO_EXTENSIONS,
    output: Written,
) -> ExitCode:
    """Sum up each log, and all logs together."""
    whole = Statistics()
    codes: list[ExitCode] = []
    for log, selection in selected(reading, output, core=extending.core()):
        if codes and not output.is_json:
            output.line()
        with output.apart_from_others(log.path):
            statistics = _count(log, selection, output)
            _show(output, log, statistics, sort, _incomplete(log, selection))
            whole.add(statistics)
            output.damage_of(log)
            codes.append(output.coverage_of(log, selection, is_found=statistics.num_events > 0))
    if whole.num_logs > 1:
        if not output.is_json:
            output.line()
        _show(output, None, whole, sort)
    return gravest(codes)


def _count(log: StoredLog, selection: Selection, output: Output) -> Statistics:
    model = Model(log.core.tables, log.configuration)  # without a snapshot, so that every event of the log is counted
    counting = Counting(model, log.core, selection)
    reader = Reader(model, counting.visitors)
    with output.progress(log, "counting"):
        for batch in log.batches(selection.last_sequence):
            take_batch(reader, log, batch)
            counting.end_frame(batch)
    return counting.result()


def _incomplete(log: StoredLog, selection: Selection) -> str:
    """Return in words why the figures do not cover the whole selection. Empty if they cover it."""
    reason = readable(log, selection).why_nothing
    if reason:
        return f"nothing could be checked: {reason}"
    if log.begins_late:
        return f"counted from event {log.first_sequence} on; earlier events are not in the log"
    if log.damage:
        kinds = ", ".join(sorted({damage.kind for damage in log.damage}))
        return f"the log is damaged ({kinds}): events may be missing"
    return ""


def _show(output: Output, log: StoredLog | None, statistics: Statistics, sort: str, incomplete: str = "") -> None:
    """Print the figures of one log, or of all logs together if `log` is None."""
    if output.is_json:
        _show_json(output, log, statistics, sort, incomplete)
    elif log is not None and not statistics.num_events:
        output.field("log", str(log.path), "bold")
        output.field("note", incomplete or "no event is selected", "yellow")
    else:
        _show_text(output, log, statistics, sort, incomplete)


# --- for programs -------------------------------------------------------------------------------


def _show_json(output: Output, log: StoredLog | None, statistics: Statistics, sort: str, incomplete: str) -> None:
    path = None if log is None else str(log.path)
    output.record(
        "statistics",
        {
            "path": path,
            **attrs.asdict(statistics, recurse=False, filter=attrs.filters.include(int)),
            "rates": _rates(statistics),
            "figures": attrs.asdict(statistics.figures),
            "incomplete": incomplete,
        },
    )
    if log is not None:
        show_ending(output, log, statistics.num_open_requests)
    output.record("total", {"path": path, **total(statistics.sums), "advice": _advice(log, statistics)})
    for name, percentiles in statistics.percentiles.items():
        output.record("percentiles", {"path": path, "of": name, **percentiles.summary()})
    for name, amount in sorted(statistics.of_extensions.items()):
        extension, _, what = name.partition("/")
        output.record("figure", {"path": path, "extension": extension, "what": what, "amount": amount})
    show_pool_sizes(output, path, statistics.pool)
    for event_id, num_bytes in _sorted(statistics, sort):
        num_events = statistics.events[event_id]
        output.record("events", {"path": path, "event": event_id, "num_events": num_events, "num_bytes": num_bytes})
    for num_recomputed, request_id, ordinal in statistics.top:
        fields = {"request_id": request_id, "ordinal": ordinal, "num_tokens_recomputed": num_recomputed}
        output.record("top_request", {"path": path, **fields})


def _advice(log: StoredLog | None, statistics: Statistics) -> dict[str, str]:
    """Return reason → what to change. Empty for several logs, because their configurations may differ."""
    if log is None or log.decides_elsewhere:
        return {}
    return advice(statistics.sums, log.configuration, Spent(**statistics.spent), statistics.num_queued)


def _rates(statistics: Statistics) -> dict[str, float]:
    """Return name → rate per second of covered time. For several logs, the covered time is the sum over the logs."""
    seconds = statistics.duration_ns / _NS_PER_S
    figures = statistics.figures
    counts = {
        "requests": figures.num_requests,
        "steps": statistics.num_steps,
        "tokens_scheduled": statistics.num_tokens_scheduled,
        "lookups": figures.num_lookups,
        "preemptions": figures.num_preemptions,
        "bytes_saved": figures.num_bytes_saved,
        "bytes_loaded": figures.num_bytes_loaded,
        "events": statistics.num_events,
        "log_bytes": statistics.num_bytes,
    }
    return {name: round(count / seconds, 3) if seconds > 0 else 0.0 for name, count in counts.items()}


# --- for people ---------------------------------------------------------------------------------


def _show_text(output: Output, log: StoredLog | None, statistics: Statistics, sort: str, incomplete: str) -> None:
    figures = statistics.figures
    rates = _rates(statistics)
    output.field("log", f"all {statistics.num_logs} logs" if log is None else str(log.path), "bold")
    if incomplete:
        output.field("note", incomplete, "yellow")
    steps = plural(statistics.num_steps, "step")
    output.field("covers", f"{duration(statistics.duration_ns)}, {plural(figures.num_requests, 'request')}, {steps}")
    if log is not None:
        show_ending(output, log, statistics.num_open_requests)
    output.field(
        "per second",
        f"{rates['requests']:.2f} requests, {rates['steps']:.1f} steps, {rates['tokens_scheduled']:.0f} tokens, "
        f"{rates['lookups']:.1f} lookups, {rates['events']:.0f} events, {size(round(rates['log_bytes']))} of log",
    )
    has_own_copies = log is None or not log.decides_elsewhere
    output.figures(figures, has_own_copies=has_own_copies, num_deferrals=statistics.num_deferrals)
    for name, amount in sorted(statistics.of_extensions.items()):
        extension, _, what = name.partition("/")
        output.field(extension, f"{what}: {amount}")
    output.line()
    _show_percentiles(output, statistics)
    output.line()
    show_total(output, statistics.sums)
    show_advice(output, _advice(log, statistics))
    if statistics.top:
        output.line()
        rows = [[request_id, str(count)] for count, request_id, _ in statistics.top]
        output.table({"request": "left", "tokens computed again": "right"}, rows)
    output.line()
    show_pool_sizes(output, None, statistics.pool)
    output.line()
    _show_events(output, statistics, sort)


_NAMES = {
    "load_time_ns": "load",
    "save_time_ns": "save",
    "queue_time_ns": "queued",
    "recovery_time_ns": "preempted → running again",
    "events_per_step": "events a step",
    "bytes_per_step": "log bytes a step",
}


def _show_percentiles(output: Output, statistics: Statistics) -> None:
    shown = ("count", "p50", "p90", "p99", "max")
    rows = []
    for name, percentiles in statistics.percentiles.items():
        summary = percentiles.summary()
        count, *values = (summary[column] for column in shown)
        cells = map(duration if name.endswith("_ns") else str, values)
        rows.append([_NAMES.get(name, name.removesuffix("_ns")), str(count), *cells])
    output.table({"within 1%": "left", **dict.fromkeys(shown, "right")}, rows)


def _show_events(output: Output, statistics: Statistics, sort: str) -> None:
    all_bytes = statistics.event_bytes.total() or 1
    rows = [
        [event_id, str(statistics.events[event_id]), str(count), f"{count / all_bytes:.1%}"]
        for event_id, count in _sorted(statistics, sort)
    ]
    output.table(_COLUMNS, rows)


def _sorted(statistics: Statistics, sort: str) -> list[tuple[str, int]]:
    """Return (event id, bytes) for each kind of event, sorted by the column that the user chose."""
    if sort == "event":
        return sorted(statistics.event_bytes.items())
    of = statistics.event_bytes if sort == "bytes" else statistics.events
    return [(event_id, statistics.event_bytes[event_id]) for event_id, _ in of.most_common()]
