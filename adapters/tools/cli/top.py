"""`kvledger top`: show what a running engine is doing, from the log that it writes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import attrs
import msgspec
from cyclopts import Parameter
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvledger.adapters.core import composed_core
from kvledger.adapters.tools.cli.feed import follow
from kvledger.adapters.tools.cli.options import DEFAULT_LOG, positive, seconds, value
from kvledger.adapters.tools.cli.output import Output, Written
from kvledger.adapters.tools.exit_codes import ExitCode
from kvledger.adapters.tools.logs.ending import ending_text
from kvledger.adapters.tools.logs.log import StoredLog, open_log
from kvledger.adapters.tools.logs.overview import Overview, Overviews
from kvledger.adapters.tools.logs.reading import begin_model, begin_totals, take_batch
from kvledger.adapters.tools.logs.sources import engine_starts, find_logs
from kvledger.adapters.tools.logs.visible import visible
from kvledger.adapters.units import duration, plural
from kvledger.lifecycle.reader import Reader
from kvledger.storage.events import HowEnded

_NS_PER_S = 1_000_000_000
_SILENT_AFTER_S = 10
"""If requests are open and the log gets no event for this many seconds, the engine may hang."""


def run(
    log: Annotated[Path, Parameter(env_var=DEFAULT_LOG, help="a log_dir (the newest log is shown), or one log")],
    *,
    interval: Annotated[
        float,
        value(
            seconds,
            "DURATION",
            help="time between two views, such as 500ms or 2s; the default value shown here is in seconds",
        ),
    ] = 1.0,
    limit: Annotated[int, value(positive, "N", help="show the N requests that have waited longest")] = 10,
    once: Annotated[
        bool, Parameter(help="print one view and end; the default if stdout is no terminal and --json is not given")
    ] = False,
    output: Written,
) -> ExitCode:
    """Show views of the engine until it has ended or you press Ctrl-C. With `once`, show one view."""
    once = once or not (output.is_terminal or output.is_json)
    shown, stored, view = _newest(log), None, None
    try:
        with contextlib.nullcontext() if once or output.is_json else output.screen():
            while stored is None or shown != stored.path:
                stored = open_log(shown, composed_core((), ()))
                for view in _views(stored, output, interval, limit):
                    _show(view, output)
                    if once:
                        break
                shown = stored.path if once else _newest(log)  # another log if the engine has restarted
        if not once and not output.is_json and view is not None:
            _show(view, output)
    except KeyboardInterrupt:
        pass
    if stored is not None:
        output.damage_of(stored)
    return ExitCode.SOUND


def _newest(log: Path) -> Path:
    return engine_starts(find_logs(log))[-1].main


@attrs.frozen
class _View:
    """Content of one view: what the engine does at one moment."""

    log: StoredLog
    overview: Overview
    silent_ns: int | None
    """Nanoseconds since the last event; None if no process writes the log, or if the header has no opening time."""


def _views(log: StoredLog, output: Output, interval_s: float, limit: int) -> Iterator[_View]:
    model = begin_model(log, at_newest_snapshot=True)
    totals = begin_totals(log, model)
    overviews = Overviews(model, totals)
    reader = Reader(model, [totals, overviews])
    opened_ns = log.header.get("opened_at_unix_ns")
    next_at = 0.0
    for batch in follow(log, output):
        if batch is not None:
            take_batch(reader, log, batch)
        elif time.monotonic() >= next_at:
            is_open = log.look_at_end().how is HowEnded.OPEN
            overview = overviews.now(limit)
            silent_ns = None
            if is_open and isinstance(opened_ns, int):
                silent_ns = max(0, time.time_ns() - opened_ns - overview.time_ns)
            yield _View(log, overview, silent_ns)
            next_at = time.monotonic() + interval_s
    log.look_at_end()
    yield _View(log, overviews.now(limit), None)


def _show(view: _View, output: Output) -> None:
    log, overview = view.log, view.overview
    if not output.is_json:
        output.show(_drawn(view))
        return
    fields = attrs.asdict(overview, recurse=False)
    fields["worst"] = [
        attrs.asdict(each, filter=attrs.filters.exclude("spent")) | msgspec.structs.asdict(each.spent)
        for each in overview.worst
    ]
    about = {"path": str(log.path), "end": log.ending.how.value, "silent_ns": view.silent_ns}
    output.record("overview", {**about, **fields, "num_device_blocks": log.num_device_blocks or None})
    output.flush()


def _drawn(view: _View) -> RenderableType:
    log, overview = view.log, view.overview
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column(overflow="fold")
    for name, (text, style) in _lines(view).items():
        lines.add_row(name, Text(visible(text), style))
    title = Text(visible(f"{log.path.name}, {log.written_by}"), "bold")
    return Group(title, lines, Text(), _worst(overview)) if overview.worst else Group(title, lines)


def _lines(view: _View) -> dict[str, tuple[str, str]]:
    """Return the lines of a view: name → (text, style)."""
    overview, log = view.overview, view.log
    num_open = overview.num_running + overview.num_waiting + overview.num_preempted
    requests = f"{overview.num_running} running, {overview.num_waiting} waiting, {overview.num_preempted} preempted"
    finished = f"; {overview.num_finished} finished since event {log.start_sequence + 1}"
    num_faults = overview.num_violations + overview.num_hook_failures
    faults = f"{plural(overview.num_violations, 'broken rule')} and {plural(overview.num_hook_failures, 'failed hook')}"
    recently = _rate(overview.num_recently_hit, overview.num_recently_queried)
    in_all = _rate(overview.num_tokens_hit, overview.num_tokens_queried)
    last = f"; the last: {overview.last_fault}" if overview.last_fault else ""
    return {
        "log": _log_line(view, num_open),
        "requests": (requests + finished, "yellow" if overview.num_preempted else ""),
        "blocks": (_blocks(overview, log.num_device_blocks), ""),
        "hit rate": (f"last {-(-overview.recent_ns // _NS_PER_S)} s: {recently}; since the start: {in_all}", ""),
        "copies": (_copies(overview), ""),
        "faults": (f"{faults} recorded{last}" if num_faults else "none recorded", "red" if num_faults else ""),
    }


def _log_line(view: _View, num_open: int) -> tuple[str, str]:
    ending = view.log.ending
    if ending.how is not HowEnded.OPEN:
        return ending_text(ending, num_open), "yellow"
    at = f"open, event {view.overview.last_sequence:,}"
    if view.silent_ns is None:
        return at, ""
    is_silent = num_open > 0 and view.silent_ns > _SILENT_AFTER_S * _NS_PER_S
    return f"{at}, {duration(view.silent_ns)} ago", "bold red" if is_silent else ""


def _blocks(overview: Overview, num_device_blocks: int) -> str:
    if overview.num_blocks_held is None:
        return "not counted: a group of layers has a window"
    of_all = f" of {num_device_blocks:,}" if num_device_blocks else ""
    return f"{overview.num_blocks_held:,}{of_all} held by requests"


def _rate(num_hit: int, num_queried: int) -> str:
    if not num_queried:
        return "no admission"
    return f"{num_hit / num_queried:.0%} ({num_hit:,} of {num_queried:,} tokens)"


def _copies(overview: Overview) -> str:
    if overview.oldest_copy_ns is None:
        return "none in flight"
    loads, saves = plural(overview.num_loads, "load"), plural(overview.num_saves, "save")
    return f"{loads} and {saves} in flight, the oldest for {duration(overview.time_ns - overview.oldest_copy_ns)}"


def _worst(overview: Overview) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("waited longest", overflow="ellipsis", no_wrap=True, ratio=1)
    table.add_column("state")
    for name in ("took", "queued", "preempted", "times", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in overview.worst:
        spent = each.spent
        times = (duration(spent.total_ns), duration(spent.queued_ns), duration(spent.preempted_ns))
        row = (each.request_id, each.state, *times, str(each.num_preemptions), f"{each.num_tokens:,}")
        table.add_row(*(Text(visible(cell)) for cell in row))
    return table
