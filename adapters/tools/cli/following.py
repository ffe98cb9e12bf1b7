"""`kvledger show --follow`: print a log line by line while a process writes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import attrs

from kvledger.adapters.tools.cli.feed import Feed, Line, follow
from kvledger.adapters.tools.cli.output import Output, show_ending
from kvledger.adapters.tools.exit_codes import ExitCode
from kvledger.adapters.tools.logs.clock import Clock
from kvledger.adapters.tools.logs.describe import state_change
from kvledger.adapters.tools.logs.ending import under_way_text
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.logs.reading import begin_model, take_batch
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.under_way import UnderWay
from kvledger.adapters.units import milliseconds
from kvledger.lifecycle.reader import Reader


def show_following(
    log: StoredLog, selection: Selection, output: Output, num_last: int | None, *, is_from_end: bool
) -> ExitCode:
    """Print the log's lines until no process writes the log any more. Then print how the log ended.

    Args:
        log: the opened log.
        selection: the part to print.
        output: where to print it.
        num_last: number of lines to print of the part that was written before the call; None: all.
        is_from_end: whether to begin at the newest snapshot instead of the log's beginning.
    """
    earlier: deque[Line] | None = deque(maxlen=num_last)
    model, clock = begin_model(log, at_newest_snapshot=is_from_end), Clock(log.header)
    feed = Feed(model, log.core)
    reader = Reader(model, [feed])
    before = shown = None
    for batch in follow(log, output):
        if batch is not None:
            if batch.gap is not None and not batch.gap.is_in_snapshot:
                output.remark(str(batch.gap))
            take_batch(reader, log, batch)
            for line in feed.pop_lines():
                if selection.is_over(line.first_sequence):
                    _show_lines(output, earlier or (), clock)
                    return ExitCode.SOUND
                if selection.holds(line.first_sequence) and selection.request_id in {None, line.request_id}:
                    if earlier is None:
                        _show_lines(output, [line], clock)
                    else:
                        earlier.append(line)
            log.last_events = tuple(batch.numbered())
            continue
        _show_lines(output, earlier or (), clock)
        earlier = None
        # Only a call that hangs is still in progress at two polls in a row.
        now = feed.state.under_way
        if now is not None and now == before != shown:
            shown = now
            _show_under_way(output, log, now, clock)
        before = now
        output.flush()
    log.look_at_end()
    show_ending(output, log, model.lives.num_open)
    return output.coverage_of(log, selection)


def _show_under_way(output: Output, log: StoredLog, call: UnderWay, clock: Clock) -> None:
    if output.is_json:
        output.record("under_way", {**attrs.asdict(call), "time_unix_ns": clock.unix_ns(call.time_ns)})
        return
    log.look_at_end()
    at = _moment(output, clock, call.time_ns, call.sequence)
    output.line(f"{at}{under_way_text(call, log)}", "yellow", indent=len(at))


def _show_lines(output: Output, lines: Iterable[Line], clock: Clock) -> None:
    for line in lines:
        if output.is_json:
            output.record("line", {**attrs.asdict(line), "time_unix_ns": clock.unix_ns(line.time_ns)})
            continue
        states = state_change(line.state_before, line.state_after)
        at = _moment(output, clock, line.time_ns, line.first_sequence)
        text = f"{at}{line.request_id}  {states}  {line.text}"
        output.line(text, "red" if line.num_broken else "", indent=len(at))


def _moment(output: Output, clock: Clock, time_ns: int, sequence: int) -> str:
    """Return the beginning of a line: time and sequence number. If the day has changed, first print the date."""
    if day := clock.new_day(time_ns):
        output.line(f"{day} (UTC)", style="dim")
    at = f"{milliseconds(time_ns):>12}  {sequence:>8}  "
    return f"{clock.time_of_day(time_ns)}  {at}" if clock.is_known else at
