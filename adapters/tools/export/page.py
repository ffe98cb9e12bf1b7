"""Writes one self-contained HTML page about the logs of a directory, for a ticket.

The page is safe whatever the logs contain. The templates define the look and escape all text from the logs. The page's
content security policy allows only its own style and script, by their hashes. Even unescaped text could therefore not
run as a script, and the page fetches nothing. This module chooses the contents of the page, and what to leave out of
large logs.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from importlib import resources

import attrs
import jinja2

from kvledger.adapters.tools.export import reasons
from kvledger.adapters.tools.export.axis import Axis
from kvledger.adapters.tools.export.clock import PageClock
from kvledger.adapters.tools.export.curves import HEIGHT, NUM_COLUMNS, curves
from kvledger.adapters.tools.export.identifiers import Pieces, told_apart
from kvledger.adapters.tools.export.part import Part, Reading
from kvledger.adapters.tools.export.pool_curve import PoolCurve
from kvledger.adapters.tools.export.shown import MAX_REQUESTS, SLOTS, Request
from kvledger.adapters.tools.export.timelines import RequestTimeline
from kvledger.adapters.tools.export.tokens import Bar, after_preemptions, at_admissions
from kvledger.adapters.tools.logs.describe import describe_core_event, state_change
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.logs.processes import num_cores, separate_processes
from kvledger.adapters.tools.logs.progress import Progress
from kvledger.adapters.tools.logs.remote_verification import OpenLog
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.visible import visible
from kvledger.adapters.tools.reasons import BY_DESIGN, Sums
from kvledger.adapters.units import duration, event_range, milliseconds, plural, ranges, size

_ZOOMS = (1, 4, 16, 64)
"""Widths of the time axis, as multiples of the width of its window. Each width has its own labels."""
_MAX_TIMELINES = 60
"""Maximum number of requests that are shown event by event."""
_WORK_OF_TIMELINES = 20_000_000
"""Largest product of the events in a log and the log's timelines. With a larger product, a page would take minutes, so
fewer timelines are shown."""
_MAX_CAUSES = 400
_MAX_FOLDS_NAMED = 8
_NUMBERS = frozenset(
    (
        *("ms", "event", "events", "took", "left to compute", "computed again", "calls", "total", "mean", "longest"),
        *("time", "arrived", "opened (UTC)", "covers", "end of the longest", "requests", "recovered", "retained"),
        *("prompt", "output", "preempted", "loaded", "recomputed", "failures", "queued"),
        *("slots", "tokens loaded, estimated", "of those asked for"),
    )
)
"""Columns that are aligned to the right."""


def write_page(logs: Sequence[tuple[StoredLog, Selection]], open_log: OpenLog, output: Progress) -> Iterator[str]:
    """Yield the HTML page about the selected parts of these logs, piece by piece.

    Other processes verify large logs. They open these logs with `open_log`, while this process reads the logs.
    """
    with separate_processes(max(1, num_cores() - 1)) as others:
        readings = [Reading.of(log, selection, others, open_log, output) for log, selection in logs]
        chosen = _chosen(readings)
        parts = [
            Part.of(reading, requests, _most_interesting(reading, requests, num_requests=sum(map(len, chosen))), output)
            for reading, requests in zip(readings, chosen, strict=True)
        ]
    clock = PageClock(readings)
    axis = Axis(
        (clock.at(reading, first), clock.at(reading, last)) for reading in readings for first, last in reading.busy
    )
    entries = _entries(parts)
    sums, style, script = _sums(readings), _resource("page.css"), _resource("page.js")
    requested = logs[0][1].request_id
    num_requests = sum(reading.shown.num_requests for reading in readings)
    yield from _template().generate(
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        title=f"kvledger · {requested or _name_of(logs)}",
        paths=[log.path for log, _ in logs],
        parts=parts,
        log_names=told_apart([part.name for part in parts]),
        worst=max(parts, key=lambda part: ("good", "warn", "bad").index(part.verdict_style)),
        num_findings=sum(part.num_findings for part in parts),
        bars=list(_bars(readings, sums)),
        pool=PoolCurve.of([reading.pool for reading in readings]),
        **reasons.totals(sums),
        max_causes=_MAX_CAUSES,
        clock=clock,
        axis=axis,
        ticks={zoom: list(clock.labelled(axis, zoom)) for zoom in _ZOOMS},
        folds_are_named=len(axis.folds) <= _MAX_FOLDS_NAMED,
        curves=[
            curve
            for curve in curves(axis, [_samples(reading, clock) for reading in readings])
            if curve.name != SLOTS or not all(reading.log.decides_elsewhere for reading in readings)
        ],
        num_columns=NUM_COLUMNS,
        curve_height=HEIGHT,
        entries=entries,
        entries_of={id(part): [entry for entry in entries if entry.part is part] for part in parts},
        anchors={(id(entry.part), entry.name): entry.anchor for entry in reversed(entries)},
        num_requests=num_requests,
        num_unmarked=sum(entry.request.num_left_out for entry in entries),
        decides_elsewhere=all(reading.log.decides_elsewhere for reading in readings),
        opened_request=requested,
    )


# --- the choice of requests ---------------------------------------------------------------------


def _chosen(readings: Sequence[Reading]) -> list[list[Request]]:
    """Return for each log the requests to draw, those with the most trouble first (see `Request.badness`)."""
    candidates = [
        (request.interest, index, request) for index, each in enumerate(readings) for request in each.shown.requests
    ]
    candidates.sort(key=lambda candidate: candidate[0], reverse=True)
    kept = {id(request) for _, _, request in candidates[:MAX_REQUESTS]}
    return [
        sorted((request for request in each.shown.requests if id(request) in kept), key=lambda request: request.badness)
        for each in readings
    ]


def _most_interesting(reading: Reading, requests: Sequence[Request], num_requests: int) -> list[str]:
    """Return the ids of this log's requests to show event by event. All logs together show about `_MAX_TIMELINES`."""
    share = -(-_MAX_TIMELINES * len(requests) // max(1, num_requests))
    allowed = max(1, min(share, _WORK_OF_TIMELINES // max(1, reading.log.num_events)))
    by_interest = sorted(requests, key=lambda request: request.interest, reverse=True)
    return list(dict.fromkeys(request.life.request_id for request in by_interest))[:allowed]


def _name_of(logs: Sequence[tuple[StoredLog, Selection]]) -> str:
    first = logs[0][0].path
    return first.name if len(logs) == 1 else f"{len(logs)} logs of {first.parent.name}"


@attrs.frozen
class _Entry:
    """A request on the HTML page."""

    part: Part
    request: Request
    pieces: Pieces
    anchor: str
    """HTML id of the request's events, or of the request's row if the events are not shown. Unique on the page."""
    timeline: RequestTimeline | None
    """The request's events; None: they are not shown, or they are shown with an earlier life of the same id."""
    why: str
    """Reasons why tokens of the request were missed or computed again, without the reasons in `BY_DESIGN`."""

    @property
    def name(self) -> str:
        """Id of the request."""
        return self.request.life.request_id


def _entries(parts: Sequence[Part]) -> list[_Entry]:
    pieces = told_apart({request.life.request_id for part in parts for request in part.requests})
    entries: list[_Entry] = []
    taken: set[str] = set()
    for part in parts:
        shown: set[str] = set()
        for request in part.requests:
            name = request.life.request_id
            anchor, number = f"request={visible(name)}", 1
            while anchor in taken:
                number += 1
                anchor = f"request={visible(name)}&number={number}"
            taken.add(anchor)
            timeline = None if name in shown else part.timelines.get(name)
            entries.append(_Entry(part, request, pieces[name], anchor, timeline, _why(request.sums)))
            shown.add(name)
    return entries


def _why(sums: Sums | None) -> str:
    if sums is None:
        return ""
    tokens = (sums.misses() | sums.recomputed) + sums.computed_twice
    return ", ".join(f"{reason} {count:,}" for reason, count in tokens.most_common() if reason not in BY_DESIGN)


# --- sums ---------------------------------------------------------------------------------------


def _samples(reading: Reading, clock: PageClock) -> list[tuple[int, tuple[int, ...]]]:
    return [(clock.at(reading, time_ns), values) for time_ns, values in reading.shown.samples]


def _sums(readings: Sequence[Reading]) -> Sums:
    sums = Sums()
    for reading in readings:
        sums.add(reading.accounts.sums())
    return sums


def _bars(readings: Sequence[Reading], sums: Sums) -> Iterator[Bar]:
    figures = [reading.figures for reading in readings if reading.figures is not None]
    is_everything = all(reading.selection.is_everything for reading in readings)  # figures do not stop at a part
    if is_everything and len(figures) == len(readings):
        yield after_preemptions(figures)
    if sums.num_admissions:
        yield at_admissions(sums)


# --- the template -------------------------------------------------------------------------------


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        finalize=_visible,
        loader=jinja2.FunctionLoader(_resource),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"ms": milliseconds, "duration": duration, "size": size, "plural": plural, "ranges": ranges}
    environment.filters |= {"describe": describe_core_event, "number": "{:,}".format, "outcome": _outcome}
    environment.filters["multiple"] = "{:g}×".format
    environment.globals |= {"event_range": event_range, "state_change": state_change, "numbers": _NUMBERS, "id": id}
    return environment.get_template("page.html")


def _visible(value: object) -> object:
    """Return text with escaped invisible characters, because clients choose request ids. Leave markup unchanged."""
    return value if hasattr(value, "__html__") else visible(str(value))


def _outcome(outcome: str) -> str:
    """Return `length capped` for `FINISHED_LENGTH_CAPPED`."""
    return outcome.removeprefix("FINISHED_").replace("_", " ").lower()
