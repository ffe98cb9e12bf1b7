"""The rows that `kvledger tables` writes of the story `export.txt`, table by table."""

from __future__ import annotations

import datetime as dt
from functools import partial
from pathlib import Path

from pyarrow import parquet

from golden_tools.export_story import COPIES, END, LIVES, LOOKUPS, STATE_NAMES, STEPS, STORY
from golden_tools.golden import MS, Golden, printed

_OPENED = dt.datetime(2025, 6, 15, 15, 6, 40, tzinfo=dt.UTC)
Row = tuple[object, ...]


def _ns(milliseconds: float | None) -> int | None:
    return None if milliseconds is None else round(milliseconds * MS)


def _row(*cells: object, at: float, sequence: int) -> Row:
    """`at`: when it happened."""
    return "log", _OPENED + dt.timedelta(milliseconds=at), _ns(at), sequence, *cells


REQUESTS = [
    _row(
        *("doc", life.ordinal),
        *map(_ns, (life.first_running, life.finished, life.released)),
        *(life.outcome, life.num_prompt_tokens, life.num_tokens),
        *(_ns(life.states.get(state, 0)) for state in STATE_NAMES),
        *(life.num_preemptions, life.num_lookups, life.num_loaded, life.num_chunks_saved),
        *(life.num_bytes_loaded, life.num_bytes_saved, life.num_failures),
        bool(life.num_failures),  # the failed load is why it is quarantined
        at=life.arrived,
        sequence=life.sequence,
    )
    for life in LIVES
]
LOOKUP_ROWS = [
    _row(
        *("doc", each.ordinal, each.generation, 0, each.num_tokens, each.num_hit, each.num_hit),
        *(False, each.miss_reason, None, None, False),
        at=each.at,
        sequence=each.sequence,
    )
    for each in LOOKUPS
]
COPY_ROWS = [
    _row(
        *(copy.job_id, copy.kind, "doc", copy.ordinal, copy.generation),
        *map(_ns, (copy.until, copy.until - copy.since, copy.worker)),
        *("failed" if copy.error else "completed", copy.error or None, copy.num_pages, copy.num_bytes),
        *(copy.tokens or (None, None)),
        *(copy.num_chunks, False, copy.before_forward),
        *(([], [0]) if copy.error else ([0], [])),  # the one rank
        at=copy.since,
        sequence=copy.sequence,
    )
    for copy in COPIES
]
STEP_ROWS = [
    _row(
        *(number, step.num_tokens, step.num_events),
        *(int(state == step.state) for state in STATE_NAMES),
        *(step.num_loads, step.num_saves),
        at=step.at,
        sequence=step.sequence,
    )
    for number, step in enumerate(STEPS)
]
_AGAIN: dict[int, list[tuple[str, str, int]]] = {
    # The token after the 42 that were loaded had not been computed before the preemption.
    0: [],
    # vLLM counted 33 tokens as computed: 32 of the load and one more. It took them back and computed 33: one again.
    1: [("computed_twice", "load_failed", 1)],
}
REASON_ROWS = [
    _row(
        *("doc", life.ordinal, kind, reason, num_tokens),
        at=END if life.released is None else life.released,
        sequence=52 if life.released is None else 35,
    )
    for life in LIVES
    for kind, reason, num_tokens in sorted(
        [*(("missed", reason, num_tokens) for reason, num_tokens in life.missed.items()), *_AGAIN[life.ordinal]]
    )
]

_TABLES = {
    "requests": REQUESTS,
    "lookups": LOOKUP_ROWS,
    "copies": COPY_ROWS,
    "steps": STEP_ROWS,
    "reasons": REASON_ROWS,
}
"""The story has no eviction and no broken rule."""


def _rows(table: str, log: Path) -> list[Row]:
    printed("tables", log, "--table", table, "-o", log.parent / "tables")
    rows = parquet.read_table(log.parent / "tables" / f"{table}.parquet").to_pylist()
    return [tuple(row.values()) for row in rows]


GOLDEN = {f"tables, {table}": Golden("tables", STORY, partial(_rows, table), rows) for table, rows in _TABLES.items()}
