"""`kvledger show`: print the content of a log, or the timeline of one of its requests."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

import attrs
import msgspec
from cyclopts import Parameter

from kvledger.adapters.figures import Figures
from kvledger.adapters.tools.cli.finding import selected, selected_one
from kvledger.adapters.tools.cli.following import show_following
from kvledger.adapters.tools.cli.options import NO_EXTENSIONS, Extending, Moment, Reading, count, moment, value
from kvledger.adapters.tools.cli.output import Output, Written, show_ending, show_title
from kvledger.adapters.tools.cli.state import show_state
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode, gravest
from kvledger.adapters.tools.logs.clock import Clock
from kvledger.adapters.tools.logs.coverage import readable
from kvledger.adapters.tools.logs.describe import plain, spent_text, state_change
from kvledger.adapters.tools.logs.facts import UNKNOWN_TOTALS, facts_of
from kvledger.adapters.tools.logs.index import index_for
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.logs.reading import HEADER_LOST, begin_model, begin_totals, take_batch
from kvledger.adapters.tools.logs.requests import Requests, RequestSummary
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.streams import StreamUrl, keep_mirrored
from kvledger.adapters.tools.logs.timeline import Group, Timelines, begin_timelines
from kvledger.adapters.units import event_range, milliseconds, plural
from kvledger.lifecycle.reader import Model, Reader

_MAX_LISTED = 200
_LINES_BEFORE = 10
"""Number of past lines that `--follow` prints first."""
_MAX_IN_FRAME = 4096
"""Number of events at a log's end in which to look for a call in progress; one hook call writes fewer events."""
_COLUMNS = {
    "request": "left",
    "outcome": "left",
    "UTC": "left",
    "arrived ms": "right",
    "took ms": "right",
    "queued ms": "right",
    "prompt": "right",
    "tokens": "right",
    "preempted": "right",
    "lookups": "right",
    "loaded": "right",
    "saved chunks": "right",
    "failures": "right",
}
_OPTIONAL = ("lookups", "saved chunks", "arrived ms", "prompt", "loaded", "failures", "UTC", "queued ms")
"""Columns to leave out on a narrow terminal, in this order."""
_SORTS: Mapping[str, Callable[[RequestSummary], int] | None] = {
    "arrived": None,
    "took": lambda summary: summary.spent.total_ns,
    "queued": lambda summary: summary.spent.queued_ns,
    "preempted": lambda summary: summary.num_preemptions,
}
_STATUS = "FINISHED_"
"""Prefix of vLLM's names for final statuses."""


@attrs.frozen
class Listing:
    """Which requests to list, and in which order."""

    limit: int
    """Number of requests to list, which are the last ones in the chosen order; 0: all."""
    only_failed: bool
    sort: str

    def chosen(self, summaries: Sequence[RequestSummary]) -> Sequence[RequestSummary]:
        """Return the requests to list, sorted. The caller applies the limit."""
        chosen = [each for each in summaries if each.has_failed] if self.only_failed else summaries
        key = _SORTS[self.sort]
        return chosen if key is None else sorted(chosen, key=key)

    def said(self, num_listed: int, summaries: Sequence[RequestSummary]) -> str:
        """Return in words which requests are listed. Empty if all requests of the log are listed."""
        num_chosen = len(self.chosen(summaries))
        which = f"{num_chosen} of {plural(len(summaries), 'request')} failed" if self.only_failed else ""
        if num_listed == num_chosen:
            return which
        more = f"this list has the last {num_listed} of {num_chosen}; --limit 0 lists all"
        return f"{which}; {more}" if which else more


def run(
    reading: Reading,
    *,
    follow: Annotated[
        bool, Parameter(alias="-f", help="keep printing new events until no process writes the log")
    ] = False,
    tail: Annotated[
        int | None,
        value(
            count,
            "N",
            help="with --follow: print the last N lines first; default: 10, or with --since all lines from MOMENT on",
        ),
    ] = None,
    at: Annotated[
        Moment | None,
        value(moment, "MOMENT", help="show the state of the log, or of the REQUEST, at MOMENT (see --since)"),
    ] = None,
    limit: Annotated[int, value(count, "N", help="list only the last N requests; 0: list all")] = _MAX_LISTED,
    sort: Annotated[
        Literal["arrived", "took", "queued", "preempted"],
        Parameter(
            help="sort the list of requests by arrival, by total time (took), by time in the queue (queued) or by the "
            "number of preemptions (preempted); the newest, longest or most preempted request is last"
        ),
    ] = "arrived",
    failed: Annotated[
        bool,
        Parameter(
            help="list only failed requests: those that ended in an error, were quarantined, broke a rule, or had a "
            "load, save or hook that failed"
        ),
    ] = False,
    extending: Extending = NO_EXTENSIONS,
    output: Written,
) -> ExitCode:
    """Show logs, or a request."""
    if tail is not None and not follow:
        raise CommandFailed("--tail needs --follow; to shorten the list of requests, use --limit")
    if at is not None:
        if follow or failed or reading.since is not None or reading.until is not None:
            raise CommandFailed("--at shows one moment; leave out --since, --until, --follow and --failed")
        return show_state(*selected_one(attrs.evolve(reading, until=at), output, extending.core()), output)
    if follow:
        log, selection = selected_one(reading, output, extending.core())
        if isinstance(reading.log, StreamUrl):
            keep_mirrored(reading.log, reading.mirror, newest=reading.newest)
        num_last = _LINES_BEFORE if tail is None and reading.since is None else tail
        return show_following(log, selection, output, num_last, is_from_end=reading.since is None)
    codes: list[ExitCode] = []
    for log, selection in selected(reading, output, core=extending.core()):
        if codes and not output.is_json:
            output.line()
        with output.apart_from_others(log.path):
            if selection.request_id is not None:
                is_found = _show_request(log, selection, selection.request_id, output)
            else:
                _show_log(log, selection, Listing(limit, failed, sort), output)
                is_found = True
            output.damage_of(log)
            codes.append(output.coverage_of(log, selection, is_found=is_found))
    return gravest(codes)


# --- one request --------------------------------------------------------------------------------


def _show_request(log: StoredLog, selection: Selection, request_id: str, output: Output) -> bool:
    """Print the timeline of a request. Return whether the request has an event in the selected part."""
    lives: list[RequestSummary] = []

    def ended(life: RequestSummary) -> None:
        if life.request_id == request_id:
            lives.append(life)

    index = index_for(log, output, request_id) if selection.last_sequence is None else None
    if index is not None and index.contents.is_whole:
        timelines = Timelines(Model(log.core.tables, log.configuration), log.core, [request_id])
        reader = Reader(timelines.model, [timelines])
        with contextlib.closing(index):
            lives = list(index.summaries(selection.first_sequence, request_id))
            for span in index.spans(request_id):  # events outside its lives do not affect it
                events = index.events_between(span.first_sequence, span.last_sequence)
                reader.take(events)
            index.contents.copy_counts(log)
    else:
        timelines = begin_timelines(log, [request_id])
        reader = Reader(timelines.model, [timelines, Requests(timelines.model, ended)])
        with output.progress(log, "reading"):
            for batch in log.batches(selection.last_sequence):
                take_batch(reader, log, batch)
    reader.finish()
    lives = [life for life in lives if life.last_sequence >= selection.first_sequence]
    lives.sort(key=lambda life: life.ordinal)
    groups = [each for each in timelines.state.groups[request_id] if each.last_sequence >= selection.first_sequence]
    _show_timeline(output, log, request_id, groups, lives)
    return bool(groups)


def _show_timeline(
    output: Output, log: StoredLog, request_id: str, groups: list[Group], lives: Sequence[RequestSummary]
) -> None:
    clock = Clock(log.header)
    if output.is_json:
        for life in lives:
            output.record("request", _fields(life, clock))
        for group in groups:
            fields = msgspec.structs.asdict(group)
            del fields["texts"]
            times = {"time_unix_ns": clock.unix_ns(group.time_ns), "until_unix_ns": clock.unix_ns(group.until_ns)}
            output.record("group", {"request_id": request_id, **fields, **times, "text": group.text})
        return
    show_title(output, request_id, clock, groups[0].time_ns if groups else 0)
    for number, life in enumerate(lives, 1):
        of = f"life {number} of {len(lives)}: " if len(lives) > 1 else ""
        text = spent_text(life.spent, life.num_preemptions, has_finished=life.finished_ns is not None)
        output.line(f"{of}{text}")
    columns = {"UTC": "left", "ms": "right", "events": "right", "state": "left", "what happened": "left"}
    rows = []
    for group in groups:
        if day := clock.new_day(group.time_ns):
            rows.append([day, *[""] * (len(columns) - 1)])
        rows.append(
            [
                clock.time_of_day(group.time_ns),
                milliseconds(group.time_ns),
                event_range(group.first_sequence, group.last_sequence),
                state_change(group.state_before, group.state_after),
                group.text,
            ]
        )
    output.table(columns, rows, hidden=() if clock.is_known else ("UTC",))


# --- the whole log ------------------------------------------------------------------------------


def _begin(log: StoredLog, output: Output) -> Model:
    """Return a `Model` for the log's beginning. If the beginning is missing, use the first snapshot and report this."""
    model = begin_model(log, None if log.header else HEADER_LOST)
    for remark in log.start_remarks:
        output.remark(remark)
    if log.start_sequence:
        output.remark(f"events before event {log.start_sequence + 1} are known from a snapshot only")
    return model


def _show_log(log: StoredLog, selection: Selection, listing: Listing, output: Output) -> None:
    index = index_for(log, output) if selection.last_sequence is None else None
    if index is not None:
        with contextlib.closing(index):
            contents = index.contents
            contents.copy_counts(log)
            log.judge_ending(contents.last_sequence, contents.head_hash)
            first = max(1, contents.last_sequence - _MAX_IN_FRAME)
            log.last_events = tuple(index.events_between(first, contents.last_sequence))
            summaries = list(index.summaries(selection.first_sequence))
            figures = _known_figures(contents.figures, output)
            _show_summary(output, log, selection, summaries, figures, contents.last_time_ns, listing)
        return
    found: list[RequestSummary] = []
    model = _begin(log, output)
    totals = begin_totals(log, model)
    reader = Reader(model, [Requests(model, found.append), totals])
    with output.progress(log, "reading"):
        for batch in log.batches(selection.last_sequence):
            take_batch(reader, log, batch)
    reader.finish()
    found.sort(key=lambda summary: summary.first_sequence)
    summaries = [summary for summary in found if summary.last_sequence >= selection.first_sequence]
    figures = _known_figures(totals.complete_figures, output) if log.header else None
    _show_summary(output, log, selection, summaries, figures, model.moment.time_ns, listing)


def _known_figures(figures: Figures | None, output: Output) -> Figures | None:
    """Return `figures`. If they are None, report why the totals of the log are unknown."""
    if figures is None:
        output.remark(f"the totals of this log are {UNKNOWN_TOTALS}")
    return figures


def _show_summary(
    output: Output,
    log: StoredLog,
    selection: Selection,
    summaries: Sequence[RequestSummary],
    figures: Figures | None,
    duration_ns: int,
    listing: Listing,
) -> None:
    """Print facts about the log, and its requests. `figures` is None if the log's configuration or totals are lost."""
    why_nothing = readable(log, selection).why_nothing
    figures = None if why_nothing else figures
    clock = Clock(log.header)
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
                "nothing_checked": why_nothing,
            },
        )
        show_ending(output, log, None if why_nothing else num_open)
        for summary in listing.chosen(summaries):
            output.record("request", _fields(summary, clock))
        return
    for name, text in facts_of(log, duration_ns).items():
        output.field(name, text, "red" if name == "sizes" and not log.header else "")
    show_ending(output, log, None if why_nothing else num_open)
    output.field("requests", _requests(log, outcomes, why_nothing), "yellow" if why_nothing else "")
    if figures is not None:
        output.figures(figures, has_own_copies=not log.decides_elsewhere, has_requests=log.worker_rank is None)
    if summaries:
        output.line()
        listed = listing.chosen(summaries)[-listing.limit :]
        if said := listing.said(len(listed), summaries):
            output.line(said, style="dim")
        hidden = [*(["saved chunks"] if log.decides_elsewhere else []), *([] if clock.is_known else ["UTC"])]
        rows = [_request_row(summary, clock) for summary in listed]
        if rows:
            output.table(_COLUMNS, rows, hidden=hidden, optional=_OPTIONAL)


def _fields(summary: RequestSummary, clock: Clock) -> dict[str, object]:
    """Return the JSON object of a request: field name → value."""
    unix = {"arrived_unix_ns": summary.arrived_ns, "finished_unix_ns": summary.finished_ns}
    return {**summary.fields(), **{name: clock.unix_ns(time_ns) for name, time_ns in unix.items()}}


def _requests(log: StoredLog, outcomes: Counter[str], why_nothing: str) -> str:
    """Return the number of requests and their outcomes, in words."""
    if why_nothing:
        return f"{f'{outcomes.total()} in the remaining log; total ' if outcomes else ''}not known: {why_nothing}"
    if outcomes:
        return f"{outcomes.total()}: {', '.join(f'{count} {outcome}' for outcome, count in outcomes.most_common())}"
    return "none" if log.worker_rank is None else "none in a worker's log; see the scheduler's log for the requests"


def _request_row(summary: RequestSummary, clock: Clock) -> list[str]:
    took = milliseconds(summary.spent.total_ns)
    counts = (
        summary.num_prompt_tokens,
        summary.num_tokens,
        summary.num_preemptions,
        summary.num_lookups,
        summary.num_tokens_loaded,
        summary.num_chunks_saved,
        summary.num_failures,
    )
    arrived = (clock.time_of_day(summary.arrived_ns), milliseconds(summary.arrived_ns))
    queued = milliseconds(summary.spent.queued_ns)
    return [summary.request_id, summary.outcome.removeprefix(_STATUS), *arrived, took, queued, *map(str, counts)]
