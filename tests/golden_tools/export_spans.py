"""What `kvledger export --otlp` writes of the story `export.txt`: a span for each life, and what is below it."""

from __future__ import annotations

from pathlib import Path

from otlp_receiver import ReceivedSpan, spans_of_lines
from stored_logs import OPENED_AT

from golden_tools.export_story import COPIES, END, INSTANTS, LIVES, LOOKUPS, STATES, STORY, Copy, Life, State
from golden_tools.golden import MS, Golden, printed

_Span = dict[str, object]
_PREFIX = "kvledger."


def _of_life(life: Life) -> _Span:
    happened = [("lookup.answered", each.at, each.sequence) for each in LOOKUPS if each.ordinal == life.ordinal]
    happened += [(each.kind, each.at, each.sequence) for each in INSTANTS if each.ordinal == life.ordinal]
    trouble = next((each for each in INSTANTS if each.ordinal == life.ordinal and each.is_trouble), None)
    attributes: _Span = {
        "request_id": "doc",
        "ordinal": life.ordinal,
        "sequence": life.sequence,
        "last_sequence": life.last_sequence,
        "outcome": life.outcome,
        "num_prompt_tokens": life.num_prompt_tokens,
        "num_tokens": life.num_tokens,
        "num_preemptions": life.num_preemptions,
        "num_lookups": life.num_lookups,
        "num_tokens_loaded": life.num_loaded,
        "num_chunks_saved": life.num_chunks_saved,
        "num_failures": life.num_failures,
        "num_tokens_recovered": life.num_recovered,
        "num_tokens_retained": 0,
        "num_bytes_loaded": life.num_bytes_loaded,
        "num_bytes_saved": life.num_bytes_saved,
        # All that had been computed before the preemption was loaded.
        "num_tokens_recomputed": 0,
        # A cache could have spared it those of the failed load.
        "num_tokens_missed": life.missed.get("load_failed", 0),
        **{f"missed.{reason}": count for reason, count in life.missed.items()},
        **({"is_open": True} if life.released is None else {}),
        **({} if trouble is None else {"error.type": trouble.kind}),
        "gen_ai.request.id": "doc",
    }
    until = END if life.released is None else life.released
    error = "" if trouble is None else trouble.text
    return _span("request", "", life.arrived, until, attributes, tuple(happened), error)


def _of_state(each: State) -> _Span:
    attributes: _Span = {
        "request_id": "doc",
        "sequence": each.sequence,
        "generation": each.generation,
        "cause": each.cause,
        **({"left_by": each.left_by} if each.left_by else {}),
        "num_computed_tokens": each.num_computed,
        "num_computed_tokens_at_end": each.num_computed_at_end,
        "num_tokens": each.num_tokens,
        **({"is_open": True} if each.until is None else {}),
    }
    return _span(
        each.state, f"request {each.ordinal}", each.since, END if each.until is None else each.until, attributes
    )


def _of_copy(copy: Copy) -> _Span:
    attributes: _Span = {
        "request_id": "doc",
        "sequence": copy.sequence,
        "generation": copy.generation,
        "job_id": copy.job_id,
        "num_pages": copy.num_pages,
        "num_bytes": copy.num_bytes,
        **({} if copy.tokens is None else {"first_token": copy.tokens[0], "num_tokens": copy.tokens[1]}),
        "is_async": False,
        "before_forward": copy.before_forward,
        "outcome": "failed" if copy.error else "completed",
        "num_chunks": copy.num_chunks,
        "worker_ms": copy.worker,
        **({"ranks_failed": [0], "error.type": "failed"} if copy.error else {}),
    }
    return _span(
        copy.kind.replace(" ", "_"), f"request {copy.ordinal}", copy.since, copy.until, attributes, error=copy.error
    )


def _span(
    name: str,
    parent: str,
    since: float,
    until: float,
    attributes: _Span,
    events: tuple[tuple[str, float, int], ...] = (),
    error: str = "",
) -> _Span:
    times = {"since": since, "until": until}
    return {
        "name": name,
        "parent": parent,
        **times,
        "events": events,
        "error": error,
        **dict(sorted(attributes.items())),
    }


_OF_LOG = tuple((each.kind, each.at, each.sequence) for each in INSTANTS if each.ordinal is None)
# A span is written when it ends: of each life the copies and the states in the order of the events that end them.
SPANS = [
    _of_state(STATES[0]),
    _of_copy(COPIES[0]),
    _of_state(STATES[1]),
    _of_copy(COPIES[1]),
    _of_state(STATES[2]),
    _of_copy(COPIES[2]),
    *map(_of_state, STATES[3:7]),
    _of_copy(COPIES[3]),
    _of_state(STATES[7]),
    _of_life(LIVES[0]),
    _of_copy(COPIES[4]),
    *map(_of_state, STATES[8:]),
    _of_life(LIVES[1]),
    # What belongs to no request.
    _span("log", "", 0, END, {}, _OF_LOG),
]


def _spans(log: Path) -> list[_Span]:
    path = log.parent / "spans.jsonl"
    printed("export", log, "--otlp", path)
    found = spans_of_lines(path.read_text())
    names = {span.span_id: f"{span.name.removeprefix(_PREFIX)} {span.of_ours('ordinal')}" for span in found}
    return [_comparable(span, names) for span in found]


def _comparable(span: ReceivedSpan, names: dict[str, str]) -> _Span:
    attributes = {name.removeprefix(_PREFIX): value for name, value in span.attributes.items()}
    events = tuple((name, _ms(time_ns), said["kvledger.sequence"]) for name, time_ns, said in span.events)
    parent = names[span.parent_id] if span.parent_id else ""
    assert span.name.startswith(_PREFIX)
    name = span.name.removeprefix(_PREFIX)
    return _span(name, parent, _ms(span.start_ns), _ms(span.end_ns), attributes, events, span.message)


def _ms(unix_ns: int) -> float:
    return (unix_ns - OPENED_AT) / MS


GOLDEN = {"export, spans for OpenTelemetry": Golden("export", STORY, _spans, SPANS)}
