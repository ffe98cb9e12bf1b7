"""Tables for a notebook, one row at a time: names of columns end in their unit, and rows stand in the order of the log.

`docs/export.md` says what each column means. Nothing here knows files.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from kvledger.adapters.tools.export.spans import (
    CallSpan,
    CopySpan,
    Instant,
    LifeSpan,
    Lookup,
    Sink,
    Span,
    StateSpan,
    Step,
)
from kvledger.adapters.tools.logs.describe import plain_fields
from kvledger.adapters.tools.logs.log import Batch
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.lifecycle import RequestState
from kvledger.lifecycle.events import Event

Cell = str | int | None
WriteRow = Callable[[Iterable[Cell]], object]
_Value = Callable[[Any], object]


def milliseconds(time_ns: int | None) -> str | None:
    """Exact to the nanosecond, where a float of a long log would not be."""
    return None if time_ns is None else f"{time_ns // 1_000_000}.{time_ns % 1_000_000:06d}"


def _fields(*names: str, of: str = "") -> dict[str, _Value]:
    return {name: attrgetter(f"{of}.{name}" if of else name) for name in names}


def _ms(name: str) -> _Value:
    return lambda record: milliseconds(getattr(record, name))


def _of_answer(*names: str, empty: object = None) -> dict[str, _Value]:
    """What a lookup's answer says of these; `empty` is left out, and so is what this kind of answer does not have."""

    def value_of(name: str) -> _Value:
        return lambda lookup: None if (value := getattr(lookup.answer, name, None)) == empty else value

    return {name: value_of(name) for name in names}


def _in_state(state: str) -> _Value:
    return lambda request: milliseconds(request.state_ns.get(state, 0))


def _requests_in(state: str) -> _Value:
    return lambda step: step.gauges.num_requests[state]


_TABLES: dict[type, tuple[str, dict[str, _Value]]] = {
    LifeSpan: (
        "requests",
        {
            **_fields("request_id", "ordinal", "sequence"),
            "arrived_ms": _ms("since_ns"),
            "first_running_ms": _ms("first_running_ns"),
            "finished_ms": lambda request: milliseconds(request.summary.finished_ns),
            "released_ms": _ms("until_ns"),
            **_fields("outcome", "num_prompt_tokens", "num_tokens", of="summary"),
            **{f"in_{state.value}_ms": _in_state(state.value) for state in RequestState},
            **_fields("num_preemptions", "num_lookups", "num_tokens_loaded", "num_chunks_saved", of="summary"),
            **_fields("num_bytes_loaded", "num_bytes_saved"),
            **_fields("num_failures", of="summary"),
        },
    ),
    StateSpan: (
        "states",
        {
            **_fields("request_id", "ordinal", "generation", "state"),
            "since_ms": _ms("since_ns"),
            "until_ms": _ms("until_ns"),
            "duration_ms": _ms("duration_ns"),
            **_fields("cause", "left_by", "sequence"),
            **_fields("num_computed_tokens", "num_computed_tokens_at_end", "num_tokens"),
        },
    ),
    CopySpan: (
        "transfers",
        {
            **_fields("job_id", "kind", "request_id", "ordinal", "generation"),
            "issued_ms": _ms("since_ns"),
            "settled_ms": _ms("until_ns"),
            "duration_ms": _ms("duration_ns"),
            "worker_ms": _ms("worker_ns"),
            **_fields("outcome", "error", "num_pages", "num_bytes", "first_token", "num_tokens"),
            "num_chunks": lambda copy: len(copy.chunks),
            **_fields("is_async", "before_forward"),
            "num_ranks_done": lambda copy: len(copy.ranks_done),
            "num_ranks_failed": lambda copy: len(copy.ranks_failed),
            **_fields("sequence"),
        },
    ),
    Lookup: (
        "lookups",
        {
            "time_ms": _ms("time_ns"),
            **_of_answer("request_id", "generation", "num_computed_tokens", "num_tokens"),
            **_of_answer("num_hit_tokens", "num_external_tokens", "miss_reason"),
            "deferred_for_job": _of_answer("job_id", empty=0)["job_id"],
            **_of_answer("num_deferred", "is_async"),
            **_fields("ordinal", "is_repeated", "sequence"),
        },
    ),
    Step: (
        "steps",
        {
            **_fields("step"),
            "time_ms": _ms("time_ns"),
            **_fields("num_scheduled_tokens", "num_events"),
            **{f"num_{state.value}_requests": _requests_in(state.value) for state in RequestState},
            **_fields(
                "num_blocks_held",
                "num_slots_free",
                "num_slots_used",
                "num_bytes_used",
                "num_chunks_cached",
                of="gauges",
            ),
            **_fields("num_loads_in_flight", "num_saves_in_flight", of="gauges"),
            **_fields("sequence"),
        },
    ),
    Instant: (
        "instants",
        {
            "time_ms": _ms("time_ns"),
            **_fields("kind", "request_id", "ordinal", "is_trouble", "text", "sequence"),
        },
    ),
}
EVENTS = "events"
COLUMNS: dict[str, Sequence[str]] = {
    **{name: ("log", *columns, "utc") for name, columns in _TABLES.values()},
    EVENTS: ("log", "sequence", "time_ms", "event", "kind", "request_id", "cause", "fields", "utc"),
}
"""Table -> the names of its columns."""
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class Tables(Sink):
    """Writes rows of the wanted tables; the first cell is the name of the log, the last the time of day in UTC.

    `opened_at_ns` is when the log was opened, in nanoseconds of Unix time; without it the last cell is empty.
    """

    def __init__(self, log: str, opened_at_ns: int | None, write_row: Mapping[str, WriteRow]) -> None:
        self._log = log
        self._opened_at = opened_at_ns
        self._write = write_row
        self._encode = msgspec.json.Encoder().encode

    def ended(self, span: Span) -> None:
        """A row of `requests`, `states` or `transfers`; calls are rows of `events`."""
        if not isinstance(span, CallSpan):
            self._row(span, span.since_ns)

    def looked_up(self, lookup: Lookup) -> None:
        """A row of `lookups`."""
        self._row(lookup, lookup.time_ns)

    def stepped(self, step: Step) -> None:
        """A row of `steps`."""
        self._row(step, step.time_ns)

    def happened(self, instant: Instant) -> None:
        """A row of `instants`."""
        self._row(instant, instant.time_ns)

    def take_events(self, batch: Batch, selection: Selection) -> None:
        """A row of `events` for each that is selected."""
        write = self._write[EVENTS]
        for sequence, event, time_ns in batch.timed():
            request_id = getattr(event, "request_id", "")
            if selection.holds(sequence) and selection.request_id in {None, request_id}:
                write(map(_cell, self._event_cells(sequence, event, time_ns, request_id)))

    def _event_cells(self, sequence: int, event: Event, time_ns: int, request_id: str) -> Iterable[object]:
        shown = {"time_ns", "request_id", "cause"}
        fields = {name: value for name, value in plain_fields(event).items() if name not in shown}
        kind = "decision" if event.is_decision else "observation"
        rest = self._encode(fields).decode()
        time, cause = milliseconds(time_ns), getattr(event, "cause", None)
        return self._log, sequence, time, event.id, kind, request_id, cause, rest, self._utc(time_ns)

    def _row(self, record: object, time_ns: int) -> None:
        table, columns = _TABLES[type(record)]
        write = self._write.get(table)
        if write is not None:
            write([self._log, *(_cell(value(record)) for value in columns.values()), self._utc(time_ns)])

    def _utc(self, time_ns: int) -> str:
        if self._opened_at is None:
            return ""
        at = _EPOCH + dt.timedelta(microseconds=(self._opened_at + time_ns) // 1000)
        return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _cell(value: object) -> Cell:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, int | None) else str(value)
