"""Tables for a notebook, one row at a time: names of columns end in their unit, and rows stand in the order of the log.

A column is a name and how its value is made from a record, so that the tables and their documentation are one thing.
Nothing here knows files.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import msgspec

from kvledger.adapters.export.records import Copy, Life, Listener, Lookup, Moment, StateSpan, Step
from kvledger.adapters.logs.describe import plain_fields
from kvledger.adapters.logs.selection import Selection, time_of
from kvledger.lifecycle import RequestState
from kvledger.lifecycle.events import Event

Cell = str | int | None
WriteRow = Callable[[Iterable[Cell]], object]


@attrs.frozen
class Column:
    """A column of a table."""

    name: str
    value: Callable[[Any], object]
    meaning: str = ""


def _ms(name: str) -> Callable[[Any], object]:
    return lambda record: milliseconds(getattr(record, name))


def _of_life(name: str) -> Callable[[Any], object]:
    return lambda record: None if record.life is None else getattr(record.life, name)


def _field(name: str, meaning: str = "") -> Column:
    return Column(name, lambda record: getattr(record, name), meaning)


def _in_state(state: str) -> Column:
    return Column(f"in_{state}_ms", lambda life: milliseconds(life.state_ns.get(state, 0)))


def _requests_in(state: str) -> Column:
    return Column(f"num_{state}_requests", lambda step: step.gauges.num_requests[state])


def _gauge(name: str, meaning: str = "") -> Column:
    return Column(name, lambda step: getattr(step.gauges, name), meaning)


_STATES = [state.value for state in RequestState]
_SEQUENCE = _field("sequence", "number of the event")
_ORDINAL = Column("ordinal", _of_life("ordinal"), "names this life of the id; empty: its arrival is not told")

TABLES: dict[str, tuple[str, tuple[Column, ...]]] = {
    "requests": (
        "a row per life of a request, in the order of their ends; those that the log leaves open stand last",
        (
            _field("request_id"),
            _field("ordinal", "counts arrivals; unique in a log"),
            _field("sequence", "number of the event of its arrival"),
            Column("arrived_ms", _ms("arrived_ns")),
            Column("first_running_ms", _ms("first_running_ns"), "when its whole prompt was computed or in flight"),
            Column("finished_ms", _ms("finished_ns")),
            Column("released_ms", _ms("released_ns"), "when the last copy of it was settled"),
            _field("outcome", "vLLM's status at the end, or the last state that the log tells"),
            _field("num_prompt_tokens"),
            _field("num_tokens", "prompt and output"),
            *(_in_state(state) for state in _STATES),
            _field("num_preemptions"),
            _field("num_lookups"),
            _field("num_tokens_loaded"),
            _field("num_chunks_saved"),
            _field("num_bytes_loaded"),
            _field("num_bytes_saved"),
            _field("num_failures", "failed copies, broken rules and failed hooks"),
        ),
    ),
    "states": (
        "a row per stay of a request in a state, in the order of their ends",
        (
            Column("request_id", _of_life("request_id")),
            _ORDINAL,
            _field("generation"),
            _field("state"),
            Column("since_ms", _ms("since_ns")),
            Column("until_ms", _ms("until_ns"), "empty where the log ends before"),
            Column("duration_ms", lambda span: milliseconds(span.last_ns - span.since_ns)),
            _field("cause", "id of the event that led here"),
            _field("left_by", "id of the event that ended it"),
            _field("sequence", "number of the event that led here"),
            _field("num_computed_tokens", "when it began"),
            _field("num_computed_tokens_at_end"),
            _field("num_tokens", "known when it began"),
        ),
    ),
    "transfers": (
        "a row per load, save and tail save, in the order of their ends",
        (
            _field("job_id"),
            _field("kind", "`load`, `save` or `tail save`"),
            _field("request_id"),
            _ORDINAL,
            _field("generation"),
            Column("issued_ms", _ms("issued_ns")),
            Column("settled_ms", _ms("settled_ns"), "when the scheduler took every rank's word; empty: never"),
            Column("duration_ms", lambda copy: milliseconds(copy.last_ns - copy.issued_ns)),
            Column("worker_ms", _ms("worker_ns"), "what workers measured, added up over their reports"),
            _field("outcome", "`completed`, `failed`, `given up` or `open`"),
            _field("error"),
            _field("num_pages", "block pages that moved"),
            _field("num_bytes", "reported by workers"),
            _field("first_token", "of loads and tail saves"),
            _field("num_tokens", "of loads and tail saves"),
            Column("num_chunks", lambda copy: len(copy.chunks), "of saves"),
            _field("is_async", "beside the steps"),
            _field("before_forward", "its blocks were free already"),
            Column("num_ranks_done", lambda copy: len(copy.ranks_done)),
            Column("num_ranks_failed", lambda copy: len(copy.ranks_failed)),
            _field("sequence", "number of the event that issued it"),
        ),
    ),
    "lookups": (
        "a row per lookup that was answered",
        (
            Column("time_ms", _ms("time_ns")),
            _field("request_id"),
            _ORDINAL,
            _field("generation"),
            _field("num_computed_tokens", "found by vLLM itself"),
            _field("num_tokens"),
            _field("num_hit_tokens", "empty where the answer was to ask again"),
            _field("num_external_tokens", "offered"),
            _field("miss_reason", "why the hit ends where it ends"),
            Column("miss_cause", lambda lookup: lookup.miss_cause or None, "event that took the first missing chunk"),
            Column("deferred_for_job", lambda lookup: lookup.deferred_for_job or None, "the save that was waited for"),
            _field("num_deferred"),
            _field("is_repeated", "question and answer are those of the request's lookup before"),
            _field("is_async", "the load was to run beside the steps"),
            _SEQUENCE,
        ),
    ),
    "steps": (
        "a row per engine step, with what could be counted when everything was decided about it",
        (
            _field("step"),
            Column("time_ms", _ms("time_ns")),
            _field("num_scheduled_tokens"),
            _field("num_events", "the step's record and the decisions on it"),
            *(_requests_in(state) for state in _STATES),
            _gauge("num_blocks_held", "distinct blocks in the tables of requests"),
            _gauge("num_slots_free", "of the host pool"),
            _gauge("num_slots_used"),
            _gauge("num_bytes_used", "of the host pool, by what a page took in the last copy"),
            _gauge("num_chunks_cached", "that can be loaded"),
            Column("num_loads_in_flight", lambda step: step.gauges.num_loads),
            Column("num_saves_in_flight", lambda step: step.gauges.num_saves),
            _SEQUENCE,
        ),
    ),
    "moments": (
        "a row per event that stands for itself: evictions, broken rules, failed hooks, resets, notes, and more",
        (
            Column("time_ms", _ms("time_ns")),
            _field("kind", "id of the event, or `events.lost`"),
            _field("request_id"),
            _ORDINAL,
            _field("is_trouble", "something went wrong here"),
            _field("text", "in plain words"),
            _SEQUENCE,
        ),
    ),
}
EVENTS = "events"
EVENT_COLUMNS = ("sequence", "time_ms", "event", "kind", "request_id", "cause", "fields")
NAMES = (*TABLES, EVENTS)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_TIMES = {"requests": "arrived_ns", "states": "since_ns", "transfers": "issued_ns"}
"""The time of a row that `utc` stands for, where it is not `time_ns`."""


def milliseconds(time_ns: int | None) -> str | None:
    """Exact to the nanosecond, where a float of a long log would not be."""
    return None if time_ns is None else f"{time_ns // 1_000_000}.{time_ns % 1_000_000:06d}"


def column_names(table: str) -> Sequence[str]:
    """The header of a table."""
    names = EVENT_COLUMNS if table == EVENTS else tuple(column.name for column in TABLES[table][1])
    return ("log", *names, "utc")


class Tables(Listener):
    """Writes rows of the wanted tables; the first cell is the name of the log, the last the time of day in UTC.

    `opened_at_ns` is when the log was opened, in nanoseconds of Unix time; without it the last cell is empty.
    """

    def __init__(self, log: str, opened_at_ns: int | None, write_row: Mapping[str, WriteRow]) -> None:
        self._log = log
        self._opened_at = opened_at_ns
        self._write = write_row
        self._encode = msgspec.json.Encoder().encode
        self._now_ns = 0

    def life_ended(self, life: Life) -> None:
        """A row of `requests`."""
        self._row("requests", life)

    def state_ended(self, span: StateSpan) -> None:
        """A row of `states`."""
        self._row("states", span)

    def copy_ended(self, copy: Copy) -> None:
        """A row of `transfers`."""
        self._row("transfers", copy)

    def looked_up(self, lookup: Lookup) -> None:
        """A row of `lookups`."""
        self._row("lookups", lookup)

    def step_scheduled(self, step: Step) -> None:
        """A row of `steps`."""
        self._row("steps", step)

    def happened(self, moment: Moment) -> None:
        """A row of `moments`."""
        self._row("moments", moment)

    def event_of(self, selection: Selection) -> Callable[[int, Event], None]:
        """Takes events and makes a row of `events` of each that is selected."""
        write = self._write[EVENTS]

        def take(sequence: int, event: Event) -> None:
            time_ns = time_of(event)
            if time_ns is not None:
                self._now_ns = time_ns
            request_id = getattr(event, "request_id", "")
            if selection.holds(sequence) and selection.request_id in {None, request_id}:
                write(map(_cell, self._event_cells(sequence, event, request_id)))

        return take

    def _event_cells(self, sequence: int, event: Event, request_id: str) -> Iterable[object]:
        told = {"time_ns", "request_id", "cause"}
        fields = {name: value for name, value in plain_fields(event).items() if name not in told}
        kind = "decision" if event.is_decision else "observation"
        rest = self._encode(fields).decode()
        time = milliseconds(self._now_ns)
        cause = getattr(event, "cause", None)
        return self._log, sequence, time, event.id, kind, request_id, cause, rest, self._utc(self._now_ns)

    def _row(self, table: str, record: object) -> None:
        write = self._write.get(table)
        if write is not None:
            utc = self._utc(getattr(record, _TIMES.get(table, "time_ns")))
            write([self._log, *(_cell(column.value(record)) for column in TABLES[table][1]), utc])

    def _utc(self, time_ns: int) -> str:
        if self._opened_at is None:
            return ""
        at = _EPOCH + dt.timedelta(microseconds=(self._opened_at + time_ns) // 1000)
        return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _cell(value: object) -> Cell:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, int | None) else str(value)
