"""The transition table, its compiled form and its reference machine say the same."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvledger.lifecycle import Core, RequestState
from kvledger.lifecycle import events as e
from kvledger.lifecycle.machine import (
    ReferenceMachine,
    TableError,
    compile_table,
    table_fingerprint,
    triggers_of,
)
from kvledger.lifecycle.table import PHASE, Row

CORE = Core.standard()
ROWS = CORE.rows
EVERY_PAIR = [(state, event) for state in RequestState for event in CORE.request_events]


def test_the_compiled_table_is_the_golden_matrix(golden: Any) -> None:
    """Every state and request event stands in the file; a change of the table is a change somebody reads."""
    width = max(len(event.id) for event in CORE.request_events)
    lines = [
        f"{state.value:16} {event.id:{width}} {CORE.table.get((state, event), 'illegal')}"
        for state, event in EVERY_PAIR
    ]
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
    for trigger in triggers_of(event.id):
        assert CORE.table.get((state, event)) == reference.walk("phase", state, trigger)


def test_every_row_is_compiled_once() -> None:
    """No row is lost on the way."""
    assert len(CORE.table) == len(ROWS)
    assert {(row.source, row.event, row.dest) for row in ROWS} == {(*pair, dest) for pair, dest in CORE.table.items()}


def test_two_rows_for_one_state_and_event_are_refused() -> None:
    """The second would silently lose; the message names the pair."""
    rows = (*ROWS, Row(RequestState.NEW, e.PrefillCompleted, RequestState.PREEMPTED))
    with pytest.raises(TableError, match=r"\(new, prefill\.completed\) stands twice"):
        compile_table(rows)


def test_the_same_row_twice_is_refused_too() -> None:
    """A copy does no harm today and hides an edit tomorrow."""
    with pytest.raises(TableError, match="stands twice"):
        compile_table((*ROWS, ROWS[0]))


def test_a_state_that_nothing_leads_to_is_refused() -> None:
    """The message names the state and what to do."""
    rows = [row for row in ROWS if row.dest is not RequestState.RECOVERING]
    with pytest.raises(TableError, match=r"no events lead to recovering; add rows or remove the state"):
        compile_table(rows)


def test_states_that_only_reach_each_other_are_refused() -> None:
    """Being somebody's destination is not enough; the way must start at `new`."""
    rows = [
        Row(RequestState.NEW, e.RequestFinished, RequestState.FINISHED),
        *(Row(RequestState.PREEMPTED, event, dest) for event, dest in (
            (e.BlocksAllocated, RequestState.RECOVERING),
            (e.PrefillAdvanced, RequestState.CHUNKED_PREFILL),
            (e.PrefillCompleted, RequestState.RUNNING),
        )),
        Row(RequestState.RUNNING, e.RequestPreempted, RequestState.PREEMPTED),
    ]  # fmt: skip
    with pytest.raises(TableError, match="no events lead to chunked_prefill, preempted, recovering, running"):
        compile_table(rows)


@pytest.mark.parametrize("source", ["*", "new", ["new", "running"]])
def test_a_source_that_is_not_one_state_is_refused(source: Any) -> None:
    """'*' would let finished requests move; a plain string or a list is refused alike."""
    with pytest.raises(TableError, match=r"'\*' would let finished requests move"):
        compile_table((*ROWS, Row(source, e.RequestPreempted, RequestState.PREEMPTED)))


@pytest.mark.parametrize("dest", [state for state in RequestState if state is not RequestState.FINISHED])
def test_an_exit_from_finished_is_refused(dest: RequestState) -> None:
    """A finished request stays finished; the message names the event that would lead out."""
    with pytest.raises(TableError, match=r"session\.continued leads out of finished; a finished request stays"):
        compile_table((*ROWS, Row(RequestState.FINISHED, e.SessionContinued, dest)))


def test_arrival_is_birth_and_no_transition() -> None:
    """`RequestArrived` makes a request; there is no state it could start from."""
    assert not [row for row in ROWS if row.event is e.RequestArrived]


def test_a_lookup_moves_no_request() -> None:
    """Any number of lookups equals one, so no row of theirs changes the state."""
    lookups = {e.LookupRequested, e.LookupAnswered}
    assert all(row.source is row.dest for row in ROWS if row.event in lookups)


def test_every_state_can_reach_the_end() -> None:
    """From everywhere some events lead to `finished`."""
    reaching = {RequestState.FINISHED}
    for _ in RequestState:
        reaching |= {row.source for row in ROWS if row.dest in reaching}
    assert reaching == set(RequestState)


def test_the_fingerprint_knows_rows_and_not_their_order() -> None:
    """A reordered table is the same table; one with a row less is another."""
    turned_round = attrs.evolve(PHASE, rows=tuple(reversed(PHASE.rows)))
    shorter = attrs.evolve(PHASE, rows=PHASE.rows[1:])
    assert table_fingerprint([turned_round]) == table_fingerprint([PHASE])
    assert table_fingerprint([shorter]) != table_fingerprint([PHASE])


def test_the_reference_machine_does_not_know_events_outside_its_rows() -> None:
    """An event without any row is illegal, not an error."""
    assert CORE.reference.walk("phase", RequestState.NEW, "request.arrived") is None
