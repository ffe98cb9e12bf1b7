"""The tables and their columns: name, type, meaning, and how to get the value from a record of a trace.

Column names must not change, because queries use them. Times and sizes end in their unit: `_ns`, `_bytes`.
`docs/tables.md` is generated from this module.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

import attrs

from kvledger.lifecycle import RequestState
from kvledger.lifecycle.events import LookupAnswered, LookupDeferred

SCHEMA_VERSION: Final = 1
"""Version of the schema, also in the metadata of files. Increase it when a column is renamed, removed, or changes its
type or meaning."""


class ColumnType(enum.StrEnum):
    """Type of a column, named as in Arrow."""

    TIMESTAMP = "timestamp[us, UTC]"
    INT64 = "int64"
    BOOL = "bool"
    STRING = "string"
    INT64_LIST = "list<int64>"


@attrs.frozen
class Column:
    """One column. An empty text becomes null."""

    name: str
    type: ColumnType
    meaning: str
    path: str
    """Attribute path of the value in the record; empty if `value` computes it."""
    value: Callable[[Any], object] | None = None
    """Function that computes the value from the record; None: `path` leads to it."""


@attrs.frozen
class Table:
    """One table. All tables begin with the columns `COMMON`, whose values do not come from the record."""

    name: str
    meaning: str
    columns: tuple[Column, ...]

    def cells(self) -> Callable[[Any], list[object]]:
        """Return a function that takes the values of the table's own columns from a record."""
        take = attrgetter(*(column.path or "sequence" for column in self.columns))
        computed = [(place, column.value) for place, column in enumerate(self.columns) if column.value is not None]

        def cells_of(record: object) -> list[object]:
            cells = list(take(record))
            for place, value in computed:
                cells[place] = value(record)
            return cells

        return cells_of

    @property
    def all_columns(self) -> tuple[Column, ...]:
        """`COMMON`, then the table's own columns."""
        return (*COMMON, *self.columns)


@attrs.frozen(kw_only=True)
class EvictionRow:
    """Chunks that left the host pool because one save needed their slots."""

    sequence: int
    time_ns: int
    request_id: str
    ordinal: int | None
    generation: int
    num_chunks: int
    cause: int


@attrs.frozen(kw_only=True)
class ReasonRow:
    """Tokens of one life that have the same reason."""

    sequence: int
    time_ns: int
    request_id: str | None
    ordinal: int | None
    kind: str
    reason: str
    num_tokens: int


@attrs.frozen(kw_only=True)
class ViolationRow:
    """A breach of a rule, or the number of breaches of a rule if none of them has a row."""

    sequence: int | None
    time_ns: int | None
    rank: int | None
    rule: str
    request_id: str
    generation: int | None
    detail: str
    evidence: tuple[int, ...]
    num_of_rule: int


_Value = Callable[[Any], object]
_T = ColumnType


def _column(name: str, type_: ColumnType, meaning: str, value: str | _Value = "") -> Column:
    """Make a column. `value` is a function or an attribute path; default: the attribute with the column's name."""
    return Column(name, type_, meaning, "", value) if callable(value) else Column(name, type_, meaning, value or name)


def _int(name: str, meaning: str, value: str | _Value = "") -> Column:
    return _column(name, _T.INT64, meaning, value)


def _text(name: str, meaning: str, value: str = "") -> Column:
    return _column(name, _T.STRING, meaning, value)


def _of(kind: type, name: str) -> _Value:
    """Return a function that gets a field of a lookup's answer, or None if the answer is not of the class `kind`."""
    return lambda lookup: getattr(lookup.answer, name) if isinstance(lookup.answer, kind) else None


def _in_state(state: str) -> _Value:
    return lambda request: request.state_ns.get(state, 0)


def _num_in_state(state: str) -> _Value:
    return lambda step: step.gauges.num_requests[state]


COMMON: Final = (
    _column("start", _T.STRING, "name of the engine start, which is the name of its log's directory"),
    _column(
        "time", _T.TIMESTAMP, "date and time (UTC) of the event at `sequence`; null if the log lacks its opening time"
    ),
    _int("time_ns", "time of the event at `sequence`, in nanoseconds since the log was opened"),
    _int("sequence", "sequence number of the row's event, for the options `--since` and `--until` of other commands"),
)
_REQUEST_ID = _text("request_id", "vLLM's id of the request")
_ORDINAL = _int(
    "ordinal",
    "number of the life; `start` and `ordinal` together identify a row of the table `requests`. null: the log lacks "
    "the request's arrival",
)
_GENERATION = _int(
    "generation",
    "how often, up to `time`, the life was preempted, rolled back to 0 tokens, or continued with a session's next turn",
)

_REQUESTS = Table(
    "requests",
    "One row per life of a request, from its arrival to its release. Rows are in the order of releases. Requests whose "
    "release is not in the log come last. `time` and `sequence` belong to the arrival.",
    (
        _REQUEST_ID,
        _int("ordinal", "number of the life in the order of arrivals, from 0; unique in a log"),
        _int(
            "first_running_ns",
            "first time at which all prompt tokens were computed or in a step in flight; null: never in the log",
        ),
        _int("finished_ns", "time at which vLLM finished the request; null: not in the log", "summary.finished_ns"),
        _int(
            "released_ns",
            "time at which the request was released, after its last copy; null: not in the log",
            "until_ns",
        ),
        _text(
            "outcome",
            "vLLM's status of the finished request; if it has not finished, its last state in the log",
            "summary.outcome",
        ),
        _int("num_prompt_tokens", "tokens of the request's prompt", "summary.num_prompt_tokens"),
        _int("num_tokens", "tokens of the request's prompt and output", "summary.num_tokens"),
        *(
            _int(
                f"in_{state.value}_ns",
                f"time that the request spent in the state `{state.value}`",
                _in_state(state.value),
            )
            for state in RequestState
        ),
        _int("num_preemptions", "how often the request was preempted", "summary.num_preemptions"),
        _int("num_lookups", "how often the scheduler looked up the request", "summary.num_lookups"),
        _int("num_tokens_loaded", "tokens of the request's completed loads", "summary.num_tokens_loaded"),
        _int("num_chunks_saved", "chunks of the request's completed saves", "summary.num_chunks_saved"),
        _int("loaded_bytes", "bytes of the request's loads, as workers reported them", "num_bytes_loaded"),
        _int("saved_bytes", "bytes of the request's saves, as workers reported them", "num_bytes_saved"),
        _int(
            "num_failures",
            "number of failed copies, refused loads, broken rules and failed hooks of the request",
            "summary.num_failures",
        ),
        _column("is_quarantined", _T.BOOL, "whether the request was quarantined", "summary.is_quarantined"),
    ),
)
_LOOKUPS = Table(
    "lookups",
    "One row per answer to a lookup, including deferrals.",
    (
        _text("request_id", _REQUEST_ID.meaning, "answer.request_id"),
        _ORDINAL,
        _int("generation", _GENERATION.meaning, "answer.generation"),
        _int(
            "num_computed_tokens",
            "tokens of the request that vLLM's own prefix cache has",
            "answer.num_computed_tokens",
        ),
        _int("num_tokens", "tokens of the request's prompt and output", "answer.num_tokens"),
        _int(
            "num_hit_tokens",
            "tokens in the host pool, from the request's first token on; null if the lookup was deferred",
            _of(LookupAnswered, "num_hit_tokens"),
        ),
        _int(
            "num_external_tokens",
            "tokens that the answer offers; null if the lookup was deferred",
            _of(LookupAnswered, "num_external_tokens"),
        ),
        _column(
            "is_async",
            _T.BOOL,
            "whether steps can run during the load of the offered tokens; null if the lookup was deferred",
            _of(LookupAnswered, "is_async"),
        ),
        _column(
            "miss_reason",
            _T.STRING,
            "[why the hit ends](events.md#why-a-hit-ends); null if the lookup was deferred",
            _of(LookupAnswered, "miss_reason"),
        ),
        _int(
            "deferred_for_job",
            "job id of the copy because of which the lookup was deferred; null if the lookup was answered",
            _of(LookupDeferred, "job_id"),
        ),
        _int(
            "num_deferred",
            "number of the request's consecutive deferrals, including this one; null if the lookup was answered",
            _of(LookupDeferred, "num_deferred"),
        ),
        _column(
            "is_repeated",
            _T.BOOL,
            "whether the lookup and its answer equal the request's previous lookup and answer, or this lookup and the "
            "previous one were deferred because of the same copy. While a request waits, vLLM repeats the lookup in "
            "every step, sometimes with fewer computed tokens. For one row per admission, take the last row of each "
            "`start`, `ordinal` and `generation`",
        ),
    ),
)
_COPIES = Table(
    "copies",
    "One row per copy between the device and the host pool, in the order in which the copies were settled. "
    "Copies that the log does not settle come last. `time` and `sequence` belong to the decision to copy.",
    (
        _int("job_id", "job id of the copy, unique in a log"),
        _text("kind", "kind of the copy: `load`, `save` or `tail save`"),
        _REQUEST_ID,
        _ORDINAL,
        _GENERATION,
        _int("settled_ns", "time at which the copy was settled; null: not in the log", "until_ns"),
        _int("duration_ns", "time from the decision to copy until the copy was settled, or until the end of the log"),
        _int(
            "worker_ns",
            "sum of the times that workers measured for the copy. Workers report the saves of a step together, so the "
            "reported time is divided among these saves in proportion to their bytes. The rows of a log add up to "
            "`save_duration_ns` and `load_duration_ns` of `kvledger stats`",
        ),
        _text(
            "outcome",
            "`completed`, `failed`, `given up` (a failed save whose slots a rank may still write), `open` (unsettled)",
        ),
        _text("error", "why the copy failed; null: no error"),
        _int("num_pages", "number of pages of the copy"),
        _int("copied_bytes", "bytes that the workers reported for the copy", "num_bytes"),
        _int("first_token", "number of the first token that a `load` or `tail save` copies, from 0; null for a `save`"),
        _int("num_tokens", "number of tokens that a `load` or `tail save` copies; null for a `save`"),
        _int(
            "num_chunks",
            "number of chunks that a `save` copies; 0 for a `load` or `tail save`",
            lambda copy: len(copy.chunks),
        ),
        _column("is_async", _T.BOOL, "whether steps could run during the copy"),
        _column(
            "is_before_forward",
            _T.BOOL,
            "whether a save had to complete before its step's forward pass, because its blocks were already free",
            "before_forward",
        ),
        _column("ranks_done", _T.INT64_LIST, "ranks that completed the copy"),
        _column("ranks_failed", _T.INT64_LIST, "ranks that reported a failure of the copy"),
    ),
)
_STEPS = Table(
    "steps",
    "One row per engine step. Counts of requests, loads and saves are those after all decisions of the step.",
    (
        _int("step", "number of the step, from 0"),
        _int("num_scheduled_tokens", "tokens that the step computes, of all requests together"),
        _int(
            "num_events",
            "number of events of the step itself: `step.scheduled` and the decisions that it caused. `events_per_step` "
            "of `kvledger stats` also counts all events after the previous step, such as lookups and reports",
        ),
        *(
            _int(
                f"num_{state.value}_requests",
                f"requests in the state `{state.value}` after the step's decisions",
                _num_in_state(state.value),
            )
            for state in RequestState
        ),
        _int("num_loads_in_flight", "loads in flight after the step's decisions", "gauges.num_loads_in_flight"),
        _int("num_saves_in_flight", "saves in flight after the step's decisions", "gauges.num_saves_in_flight"),
    ),
)
_EVICTIONS = Table(
    "evictions",
    "One row each time that chunks were evicted from the host pool, because a save needed their slots.",
    (
        _text("request_id", "the request whose save needed the slots"),
        _ORDINAL,
        _GENERATION,
        _int("num_chunks", "number of chunks that were evicted"),
        _int("cause_sequence", "sequence number of the event that caused the save", "cause"),
    ),
)
_REASONS = Table(
    "reasons",
    "Tokens by [reason](reasons.md): one row for each life, kind and reason. The sums equal those of `kvledger stats`. "
    "`time` and `sequence` belong to the request's release, or to the last event in the log if the log lacks the "
    "release. Tokens of loads that failed after their request was released have rows without a request.",
    (
        _text(
            "request_id",
            "vLLM's id of the request; null: the row is about loads that failed after their request was released",
        ),
        _int(
            "ordinal",
            "number of the life; `start` and `ordinal` together identify a row of the table `requests`. null if "
            "`request_id` is null",
        ),
        _text(
            "kind",
            "kind of the counted tokens: `missed` (left to compute when the request got blocks, for any reason, also "
            "one *by design*), `recomputed` (computed before a preemption and again after it) or `computed_twice` "
            "(computed again after a rollback)",
        ),
        _text("reason", "the reason why vLLM had to compute the tokens"),
        _int("num_tokens", "number of tokens that have this kind and reason"),
    ),
)
_VIOLATIONS = Table(
    "violations",
    "One row for each of the first 1,000 violations of rules that `kvledger verify` finds in a log. A rule that is "
    "broken only after these 1,000 violations has one row without `sequence` and `detail`.",
    (
        _int("rank", "rank of the worker that wrote the log; null: the scheduler wrote the log"),
        _text("rule", "name of the broken [rule](invariants.md)"),
        _text("request_id", "vLLM's id of the request; null: the violation is not about one request"),
        _int("generation", "generation of the request; null: the violation is not about one request"),
        _text("detail", "description of the violation"),
        _column(
            "evidence",
            _T.INT64_LIST,
            "sequence numbers of earlier events that show the violation together with the event at `sequence`",
        ),
        _int(
            "num_of_rule", "number of violations of this rule in the log; the table may have fewer rows about the rule"
        ),
    ),
)

TABLES: Final[Mapping[str, Table]] = MappingProxyType(
    {table.name: table for table in (_REQUESTS, _LOOKUPS, _COPIES, _STEPS, _EVICTIONS, _REASONS, _VIOLATIONS)}
)
"""Name → table."""
VIOLATIONS: Final = _VIOLATIONS.name
"""Name of the table that needs a verification of the log."""


def table_named(name: str) -> Table:
    """Return the table with this name.

    Raises:
        ValueError: there is no such table.
    """
    if name not in TABLES:
        raise ValueError(f"there is no table {name!r}; choose one of {', '.join(TABLES)}")
    return TABLES[name]
