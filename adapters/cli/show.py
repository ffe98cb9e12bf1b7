"""`kvledger show`: what is in a log, and the timeline of one request in it."""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

import attrs

from kvledger.adapters.cli.feed import Feed, Line, follow
from kvledger.adapters.cli.finding import selected, selected_one
from kvledger.adapters.cli.options import add_request, count
from kvledger.adapters.cli.output import Output, show_ending
from kvledger.adapters.exit_codes import ExitCode
from kvledger.adapters.logs.amounts import event_range, milliseconds
from kvledger.adapters.logs.describe import plain, state_change
from kvledger.adapters.logs.ending import under_way_text
from kvledger.adapters.logs.facts import facts_of
from kvledger.adapters.logs.index import index_for
from kvledger.adapters.logs.log import Batch, StoredLog
from kvledger.adapters.logs.observation import observations
from kvledger.adapters.logs.requests import Requests, RequestSummary
from kvledger.adapters.logs.selection import Selection
from kvledger.adapters.logs.timeline import Group, Timelines
from kvledger.adapters.logs.under_way import UnderWay
from kvledger.lifecycle import Figures, Projections
from kvledger.lifecycle import events as e

_MAX_LISTED = 200
_MAX_IN_FRAME = 4096
"""So many events are looked at for what is under way at a log's end; one hook call writes fewer."""
_COLUMNS = {
    "request": "left",
    "outcome": "left",
    "arrived ms": "right",
    "took ms": "right",
    "prompt": "right",
    "tokens": "right",
    "preempted": "right",
    "lookups": "right",
    "loaded": "right",
    "saved chunks": "right",
    "failures": "right",
}
_SAVED = "saved chunks"


def configure(parser: argparse.ArgumentParser) -> None:
    """What only this command has."""
    add_request(parser)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="keep printing new events, as long as somebody writes the log"
    )
    parser.add_argument(
        "--limit",
        metavar="N",
        type=count,
        default=_MAX_LISTED,
        help="list the last N requests; 0: all of them",
    )


def run(arguments: argparse.Namespace, output: Output) -> ExitCode:
    """Show logs, or a request."""
    if arguments.follow:
        return _follow(*selected_one(arguments, output), output)
    for number, (log, selection) in enumerate(selected(arguments, output)):
        if number and not output.is_json:
            output.line()
        with output.apart_from_others(log.path):
            if selection.request_id is not None:
                _show_request(log, selection, selection.request_id, output)
            else:
                _show_log(log, selection, arguments.limit, output)
            output.damage_of(log)
    return ExitCode.SOUND


def _unfoldable(sequence: int, event: e.Event, error: Exception) -> str:
    return f"event {sequence} ({event.id}) cannot be folded: {error!r}; what follows is left out"


# --- one request --------------------------------------------------------------------------------


def _show_request(log: StoredLog, selection: Selection, request_id: str, output: Output) -> None:
    timelines = Timelines(log.core, log.configuration, [request_id])
    index = index_for(log, output, request_id)
    if index is not None and index.contents.is_whole:
        with contextlib.closing(index):
            for span in index.spans(request_id):  # what happened before and between makes no difference to it
                events = index.events_between(span.first_sequence, span.last_sequence)
                for observation in observations(event for event in events if not selection.is_over(event[0])):
                    timelines.take(observation)
            log.damage[:] = index.contents.damage
    else:
        with output.progress(log, "reading"):
            _take_observations(log.batches(selection.last_sequence), timelines, output)
    groups = timelines.groups[request_id]
    _show_timeline(output, request_id, [group for group in groups if group.last_sequence >= selection.first_sequence])


def _take_observations(batches: Iterator[Batch], timelines: Timelines, output: Output) -> None:
    for batch in batches:
        if batch.gap is not None:
            timelines.lose(batch.gap)
        for observation in observations(batch.numbered()):
            try:
                timelines.take(observation)
            except Exception as error:  # noqa: BLE001 -- what was read before it is still worth showing
                output.remark(_unfoldable(observation.sequence, observation.event, error))
                for _ in batches:  # to the end, for the log's figures and its damage
                    pass
                return


def _follow(log: StoredLog, selection: Selection, output: Output) -> ExitCode:
    feed = Feed(log.core, log.configuration)
    before = shown = None
    for batch in follow(log, output):
        if batch is not None:
            for line in (line for observation in observations(batch.numbered()) for line in feed.take(observation)):
                if selection.is_over(line.first_sequence):
                    return ExitCode.SOUND
                if selection.holds(line.first_sequence) and selection.request_id in {None, line.request_id}:
                    _show_line(output, line)
            log.last_events = tuple(batch.numbered())
            continue
        # A call lasts less than two looks, but where it hangs.
        if feed.under_way not in {None, shown} and feed.under_way == before:
            shown = feed.under_way
            _show_under_way(output, log, shown)
        before = feed.under_way
        output.flush()
    log.look_at_end()
    show_ending(output, log, feed.num_open_requests)
    return ExitCode.SOUND


def _show_under_way(output: Output, log: StoredLog, call: UnderWay) -> None:
    if output.is_json:
        output.record("under_way", attrs.asdict(call))
        return
    log.look_at_end()
    output.line(f"{milliseconds(call.time_ns):>12}  {call.sequence:>8}  {under_way_text(call, log)}", "yellow")


def _show_line(output: Output, line: Line) -> None:
    if output.is_json:
        output.record("line", attrs.asdict(line))
        return
    states = state_change(line.state_before, line.state_after)
    text = f"{milliseconds(line.time_ns):>12}  {line.first_sequence:>8}  {line.request_id}  {states}  {line.text}"
    output.line(text, "red" if line.num_broken else "")


def _show_timeline(output: Output, request_id: str, groups: list[Group]) -> None:
    if output.is_json:
        for group in groups:
            fields = attrs.asdict(group, filter=lambda attribute, _: attribute.name != "texts")
            output.record("group", {"request_id": request_id, **fields, "text": group.text})
        return
    output.line(request_id, style="bold")
    columns = {"ms": "right", "events": "right", "state": "left", "what happened": "left"}
    rows = [
        [
            milliseconds(group.time_ns),
            event_range(group.first_sequence, group.last_sequence),
            state_change(group.state_before, group.state_after),
            group.text,
        ]
        for group in groups
    ]
    output.table(columns, rows)


# --- the whole log ------------------------------------------------------------------------------


def _start(log: StoredLog, output: Output) -> Projections:
    """The state where the log can be folded from: nothing, or what its first snapshot holds."""
    start = log.start()
    for remark in log.start_remarks:
        output.remark(remark)
    if start is not None:
        output.remark(f"what came before event {log.start_sequence + 1} is known from a snapshot only")
    return start or Projections(log.core, log.configuration)


def _show_log(log: StoredLog, selection: Selection, limit: int, output: Output) -> None:
    index = index_for(log, output) if selection.last_sequence is None else None
    if index is not None:
        with contextlib.closing(index):
            contents = index.contents
            log.num_events, log.num_frames, log.num_bytes = contents.num_events, contents.num_frames, contents.num_bytes
            log.damage[:] = contents.damage
            log.judge_ending(contents.last_sequence, contents.head_hash)
            first = max(1, contents.last_sequence - _MAX_IN_FRAME)
            log.last_events = tuple(index.events_between(first, contents.last_sequence))
            summaries = list(index.summaries(selection.first_sequence))
            _show_summary(output, log, summaries, contents.figures, contents.last_time_ns, limit)
        return
    ended: list[RequestSummary] = []
    requests = Requests(ended.append)
    projections = _start(log, output) if log.header else None

    events = log.events(selection.last_sequence)
    with output.progress(log, "reading"):
        for at, event in events:
            requests.take(at, event)
            if projections is not None and log.start_sequence < at <= log.trusted_sequence:
                try:
                    projections.fold(event, at)
                except Exception as error:  # noqa: BLE001 -- behind a gap, or forged; what was read is worth showing
                    output.remark(_unfoldable(at, event, error))
                    for _ in events:  # to the end, for the log's figures and its damage
                        pass
    if projections is not None:
        requests.finish(projections)
    summaries = sorted((*ended, *requests.current.values()), key=lambda summary: summary.first_sequence)
    summaries = [summary for summary in summaries if summary.last_sequence >= selection.first_sequence]
    if projections is None:
        _show_summary(output, log, summaries, None, 0, limit)
    else:
        _show_summary(output, log, summaries, projections.totals.figures, projections.tracker.time_ns, limit)


def _show_summary(
    output: Output,
    log: StoredLog,
    summaries: Sequence[RequestSummary],
    figures: Figures | None,
    duration_ns: int,
    limit: int,
) -> None:
    """Without figures: of a log whose configuration is lost."""
    outcomes = Counter(summary.outcome or "unknown" for summary in summaries)
    num_open = sum(summary.finished_ns is None for summary in summaries)
    if output.is_json:
        output.record(
            "log",
            {
                "path": str(log.path),
                "header": plain(log.header),
                "num_events": log.num_events,
                "num_frames": log.num_frames,
                "num_bytes": log.num_bytes,
                "duration_ns": duration_ns,
                "outcomes": dict(outcomes),
                "figures": None if figures is None else attrs.asdict(figures),
            },
        )
        show_ending(output, log, num_open)
        for summary in summaries:
            output.record("request", attrs.asdict(summary))
        return
    for name, text in facts_of(log, duration_ns).items():
        output.field(name, text, "red" if name == "sizes" and not log.header else "")
    show_ending(output, log, num_open)
    outcome_words = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    output.field("requests", f"{len(summaries)}: {outcome_words}" if outcomes else "none")
    if figures is not None:
        output.figures(figures, has_own_copies=not log.decides_elsewhere)
    if summaries:
        output.line()
        listed = summaries[-limit:] if limit else summaries
        if len(listed) < len(summaries):
            output.line(f"the last {len(listed)} of {len(summaries)}; --limit 0 lists all", style="dim")
        columns = {name: side for name, side in _COLUMNS.items() if name != _SAVED or not log.decides_elsewhere}
        rows = (dict(zip(_COLUMNS, _request_row(summary), strict=True)) for summary in listed)
        output.table(columns, [[row[name] for name in columns] for row in rows])


def _request_row(summary: RequestSummary) -> list[str]:
    took = "" if summary.finished_ns is None else milliseconds(summary.finished_ns - summary.arrived_ns)
    counts = (
        summary.num_prompt_tokens,
        summary.num_tokens,
        summary.num_preemptions,
        summary.num_lookups,
        summary.num_tokens_loaded,
        summary.num_chunks_saved,
        summary.num_failures,
    )
    return [summary.request_id, summary.outcome, milliseconds(summary.arrived_ns), took, *map(str, counts)]
