"""What `kvledger export --csv` writes of the story `export.txt`, table by table.

The table `events` lists the events of the log as they are. It follows no life, so it is not here.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from golden_tools.export_story import COPIES, END, INSTANTS, LIVES, LOOKUPS, STATE_NAMES, STATES, STEPS, STORY
from golden_tools.golden import Golden, printed


def _ms(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds:.6f}"


def _utc(milliseconds: float) -> str:
    return f"2025-06-15T15:06:40.{round(milliseconds * 1000):06}Z"


def _row(*cells: object, at: float) -> str:
    """`at`: the time of day that ends the row."""
    return ",".join(("log", *map(_cell, cells), _utc(at)))


def _cell(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


REQUESTS = [
    _row(
        *("doc", life.ordinal, life.sequence),
        *map(_ms, (life.arrived, life.first_running, life.finished, life.released)),
        *(life.outcome, life.num_prompt_tokens, life.num_tokens),
        *(_ms(life.states.get(state, 0)) for state in STATE_NAMES),
        *(life.num_preemptions, life.num_lookups, life.num_loaded, life.num_chunks_saved),
        *(life.num_bytes_loaded, life.num_bytes_saved, life.num_failures),
        at=life.arrived,
    )
    for life in LIVES
]
STATE_ROWS = [
    _row(
        *("doc", each.ordinal, each.generation, each.state),
        *(_ms(each.since), _ms(each.until), _ms((END if each.until is None else each.until) - each.since)),
        *(each.cause, each.left_by, each.sequence),
        *(each.num_computed, each.num_computed_at_end, each.num_tokens),
        at=each.since,
    )
    for each in STATES
]
TRANSFERS = [
    _row(
        *(copy.job_id, copy.kind, "doc", copy.ordinal, copy.generation),
        *map(_ms, (copy.since, copy.until, copy.until - copy.since, copy.worker)),
        *("failed" if copy.error else "completed", copy.error, copy.num_pages, copy.num_bytes),
        *(copy.tokens or ("", "")),
        *(copy.num_chunks, False, copy.before_forward),
        *((0, 1) if copy.error else (1, 0)),  # the one rank
        copy.sequence,
        at=copy.since,
    )
    for copy in COPIES
]
LOOKUP_ROWS = [
    _row(
        *(_ms(each.at), "doc", each.generation, 0, each.num_tokens, each.num_hit, each.num_hit, each.miss_reason),
        *("", "", False, each.ordinal, False, each.sequence),
        at=each.at,
    )
    for each in LOOKUPS
]
STEP_ROWS = [
    _row(
        *(number, _ms(step.at), step.num_tokens, step.num_events),
        *(int(state == step.state) for state in STATE_NAMES),
        *(step.num_blocks, 5 - step.num_slots_used, step.num_slots_used, step.num_bytes, step.num_chunks),
        *(step.num_loads, step.num_saves, step.sequence),
        at=step.at,
    )
    for number, step in enumerate(STEPS)
]
INSTANT_ROWS = [
    # A text with a comma is in quotes.
    _row(
        *(_ms(each.at), each.kind, "" if each.ordinal is None else "doc", each.ordinal, each.is_trouble),
        *(f'"{each.text}"' if "," in each.text else each.text, each.sequence),
        at=each.at,
    )
    for each in INSTANTS
]

_TABLES = {
    "requests": REQUESTS,
    "states": STATE_ROWS,
    "transfers": TRANSFERS,
    "lookups": LOOKUP_ROWS,
    "steps": STEP_ROWS,
    "instants": INSTANT_ROWS,
}


def _rows(table: str, log: Path) -> list[str]:
    """Without the names of the columns."""
    path = log.parent / f"{table}.csv"
    printed("export", log, "--csv", table, "-o", path)
    return path.read_text().splitlines()[1:]


GOLDEN = {
    f"export, the table {table}": Golden("export", STORY, partial(_rows, table), rows)
    for table, rows in _TABLES.items()
}
