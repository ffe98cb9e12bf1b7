"""The transition table, its compiled form and its reference machine say the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import pytest

from kvledger.lifecycle import Core, RequestState
from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import triggers_of
from kvledger.lifecycle.machine import (
    Moves,
    ReferenceMachine,
    TableError,
    compile_region,
    table_fingerprint,
)
from kvledger.lifecycle.table import GATING, PHASE

CORE = Core.standard()
ROWS = tuple(PHASE.flat())
"""(source, trigger, dest)"""
EVERY_PAIR = [(state, event) for state in RequestState for event in CORE.tables.request_events]


def compiled(rows: Iterable[Any]) -> Moves:
    """The phase with these rows."""
    return compile_region(attrs.evolve(PHASE, rows=tuple(rows)), CORE.events.values())


def leads_to(state: RequestState, event: type[e.RequestEvent]) -> str:
    """The phase behind it, whichever variant it is: docs/states.md has one row for all."""
    (dest,) = {CORE.tables.phase.get(trigger, {}).get(state, "illegal") for trigger in triggers_of(event)}
    return dest


def test_the_compiled_table_is_the_golden_matrix(golden: Any) -> None:
    """Every state and request event stands in the file; a change of the table is a change somebody reads."""
    width = max(len(event.id) for event in CORE.tables.request_events)
    lines = [f"{state.value:16} {event.id:{width}} {leads_to(state, event)}" for state, event in EVERY_PAIR]
    golden.check("transitions.txt", "\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def reference() -> ReferenceMachine:
    """The table run by `transitions`."""
    return CORE.reference


@pytest.mark.parametrize(("state", "event"), EVERY_PAIR, ids=lambda value: getattr(value, "id", str(value)))
def test_the_compiled_table_leads_where_the_reference_machine_leads(
    reference: ReferenceMachine, state: RequestState, event: type[e.RequestEvent]
) -> None:
    """Two independent readings of the same rows agree on every state and event, illegal ones included."""
    for trigger in triggers_of(event):
        assert leads_to(state, event) == (reference.walk("phase", state, trigger) or "illegal")


def test_every_row_is_compiled_once() -> None:
    """No row is lost on the way."""
    moves = CORE.tables.phase
    assert sum(len(dests) for dests in moves.values()) == len(ROWS)
    assert set(ROWS) == {(source, trigger, dest) for trigger, dests in moves.items() for source, dest in dests.items()}


def test_states_that_only_reach_each_other_are_refused() -> None:
    """Being somebody's destination is not enough; the way must start at `new`."""
    rows = [
        (RequestState.NEW, "request.finished", RequestState.FINISHED),
        *((RequestState.PREEMPTED, trigger, dest) for trigger, dest in (
            ("blocks.allocated", RequestState.RECOVERING),
            ("prefill.advanced", RequestState.CHUNKED_PREFILL),
            ("prefill.completed", RequestState.RUNNING),
        )),
        (RequestState.RUNNING, "request.preempted", RequestState.PREEMPTED),
    ]  # fmt: skip
    with pytest.raises(TableError, match="no events lead to chunked_prefill, preempted, recovering, running"):
        compiled(rows)


def test_arrival_is_birth_and_no_transition() -> None:
    """`RequestArrived` makes a request; there is no state it could start from."""
    assert not [trigger for _, trigger, _ in ROWS if trigger == "request.arrived"]


def test_a_lookup_moves_no_request() -> None:
    """Any number of lookups equals one, so no row of theirs changes the state."""
    lookups = {"lookup.requested", "lookup.answered"}
    assert all(source is dest for source, trigger, dest in ROWS if trigger in lookups)


def test_every_state_can_reach_the_end() -> None:
    """From everywhere some events lead to `finished`."""
    reaching = {RequestState.FINISHED}
    for _ in RequestState:
        reaching |= {source for source, _, dest in ROWS if dest in reaching}
    assert reaching == set(RequestState)


def test_the_fingerprint_knows_rows_and_not_their_order() -> None:
    """A reordered table is the same table; one with a row less is another."""
    turned_round = attrs.evolve(PHASE, rows=tuple(reversed(PHASE.rows)))
    shorter = attrs.evolve(PHASE, rows=PHASE.rows[1:])
    assert table_fingerprint([turned_round], GATING) == table_fingerprint([PHASE], GATING)
    assert table_fingerprint([shorter], GATING) != table_fingerprint([PHASE], GATING)


def test_the_reference_machine_does_not_know_events_outside_its_rows() -> None:
    """An event without any row is illegal, not an error."""
    assert CORE.reference.walk("phase", RequestState.NEW, "request.arrived") is None
