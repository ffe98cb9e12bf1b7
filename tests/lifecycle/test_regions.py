"""The regions of a request and of a job: their rows, their compiled forms and their reference machines say the same."""

from __future__ import annotations

from itertools import product
from typing import Any

import attrs
import pytest
from lifecycle_driver import play_seed
from lifecycle_driver.regions import check_regions

from kvledger.lifecycle import Core, RequestState
from kvledger.lifecycle.events import triggers_of
from kvledger.lifecycle.machine import (
    TableError,
    compile_region,
    compile_tables,
    mermaid_diagram,
)
from kvledger.lifecycle.states import BlocksRegion
from kvledger.lifecycle.table import (
    BLOCKS,
    FIRST,
    GATING,
    JOB_REGIONS,
    NO_EVENTS,
    PHASE,
    REGIONS,
    TRUST,
    WORK,
    Region,
    State,
)

CORE = Core.standard()
TRIGGERS = [*(trigger for event in CORE.events.values() for trigger in triggers_of(event)), *NO_EVENTS]
ALL_REGIONS = [*REGIONS, *JOB_REGIONS]


def lines(leads: dict[tuple[str, ...], Any]) -> str:
    """A golden file: columns, then where it leads."""
    widths = [max(len(cells[column]) for cells in leads) for column in range(len(next(iter(leads))))]
    columns = [" ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) for cells in leads]
    return "".join(f"{column} {dest}\n" for column, dest in zip(columns, leads.values(), strict=True))


def test_every_region_is_a_golden_matrix(golden: Any) -> None:
    """Every state and trigger that a region names stands in the file."""
    leads = {
        (region.name, str(state), trigger): moves[trigger].get(state, "illegal")
        for region in ALL_REGIONS
        for moves in [compile_region(region, CORE.events.values())]
        for state in region.states
        for trigger in TRIGGERS
        if trigger in moves
    }
    golden.check("regions.txt", lines(leads))


def test_what_is_legal_where_is_a_golden_matrix(golden: Any) -> None:
    """Phase and blocks together: what the gate lets through, and where it leads."""
    legal = CORE.tables.legal
    leads = {
        (str(state), str(blocks), trigger): " ".join(legal[trigger].get((state, blocks), ["illegal"]))
        for state, blocks in product(RequestState, BlocksRegion)
        for trigger in TRIGGERS
        if trigger in legal
    }
    golden.check("legal.txt", lines(leads))


@pytest.mark.parametrize("region", ALL_REGIONS, ids=lambda region: region.name)
def test_a_compiled_region_leads_where_its_reference_machine_leads(region: Region) -> None:
    """Two independent readings of the same rows agree on every state and trigger."""
    moves, reference = compile_region(region, CORE.events.values()), CORE.reference
    for state, trigger in product(region.states, TRIGGERS):
        assert reference.names(region.name, trigger) == (trigger in moves)
        assert reference.walk(region.name, state, trigger) == moves.get(trigger, {}).get(state)


def test_the_joined_regions_are_legal_where_each_reference_machine_has_a_row() -> None:
    """An event is legal where all regions that name it accept it, and nobody's row hangs on another region."""
    compiled, reference = CORE.tables, CORE.reference
    for trigger, state, blocks in product(TRIGGERS, RequestState, BlocksRegion):
        named = [name for name in ("phase", "blocks") if reference.names(name, trigger)]
        dests = [
            reference.walk(name, before, trigger) if name in named else before
            for name, before in (("phase", state), ("blocks", blocks))
        ]
        expected = None if not named or None in dests else tuple(dests)
        assert compiled.legal.get(trigger, {}).get((state, blocks)) == expected


def test_only_two_pairs_of_blocks_are_refused_beside_the_phase() -> None:
    """A load unless blocks are granted, a lookup while a load fills them."""
    moves = compile_region(BLOCKS, CORE.events.values())
    refused = {(str(state), trigger) for trigger in moves for state in BlocksRegion if state not in moves[trigger]}
    assert refused == {("none", "load.issued"), ("loading", "load.issued"), ("loading", "lookup.requested")}


@pytest.mark.parametrize("region", REGIONS[2:], ids=lambda region: region.name)
def test_a_region_that_refuses_nothing_has_a_row_for_everything_it_names(region: Region) -> None:
    """Otherwise the table does not compile; the message names the pair."""
    (sources, triggers, dest), *rows = region.rows
    assert isinstance(sources, tuple)
    shorter = attrs.evolve(region, rows=((sources[:1], triggers, dest), *rows))
    with pytest.raises(TableError, match=rf"{region.name} may not refuse events, but has no row for \({sources[1]}, "):
        compile_region(shorter, CORE.events.values())


def added(region: Region, *row: Any) -> Region:
    """The region with one row more."""
    return attrs.evolve(region, rows=(*region.rows, row))


@pytest.mark.parametrize(
    ("region", "message"),
    [
        (added(TRUST, *TRUST.rows[0]), r"trust: \(trusted, request.quarantined\) appears twice"),
        (
            added(PHASE, RequestState.NEW, "prefill.completed", RequestState.PREEMPTED),
            r"prefill.completed\) appears twice",
        ),
        (added(PHASE, "*", "request.preempted", RequestState.PREEMPTED), r"'\*', which would allow every state"),
        (added(PHASE, [RequestState.NEW], "request.preempted", RequestState.PREEMPTED), "must be states of phase"),
        (added(BLOCKS, BlocksRegion.NONE, "tokens.rolled_back", None), "no such trigger; .* or id/variant"),
        (added(BLOCKS, "none", "window.left", BlocksRegion.NONE), "must be states of blocks"),
        (added(PHASE, RequestState.FINISHED, "session.continued/all", RequestState.NEW), "leads out of finished"),
        (added(WORK, WORK.terminal, "load.issued", WORK.initial), "leads out of settled, which is a terminal state"),
        (attrs.evolve(TRUST, rows=()), "trust: no events lead to quarantined; add rows or remove the state"),
    ],
)
def test_a_region_that_breaks_a_rule_is_refused(region: Region, message: str) -> None:
    """The message names the row, and what is wrong with it."""
    with pytest.raises(TableError, match=message):
        compile_region(region, CORE.events.values())


def test_only_phase_and_blocks_may_refuse() -> None:
    """What is legal is asked for every event, and is one look into one table."""
    with pytest.raises(TableError, match="first may refuse events, but only phase and blocks are checked"):
        compile_tables(CORE.events, [PHASE, BLOCKS, attrs.evolve(FIRST, may_refuse=True)], JOB_REGIONS, GATING)


@pytest.mark.parametrize("region", ALL_REGIONS, ids=lambda region: region.name)
def test_the_diagram_of_a_region_shows_every_move_once(region: Region) -> None:
    """One arrow per pair of different states; an id without a variant stands for all of them."""
    moves: dict[tuple[State, State], set[str]] = {}
    for source, trigger, dest in region.flat():
        if source is not dest:
            moves.setdefault((source, dest), set()).add(trigger)
    arrows = [
        line.strip()
        for line in mermaid_diagram(region, CORE.events).splitlines()
        if "-->" in line and "[*]" not in line
    ]
    assert len(arrows) == len(moves)
    for (source, dest), triggers in moves.items():
        (arrow,) = [line for line in arrows if line.startswith(f"{source} --> {dest}: ")]
        shown = arrow.split(": ")[1].split(", ")
        assert {
            each for label in shown for each in (triggers_of(CORE.events[label]) if label in CORE.events else [label])
        } == triggers


@pytest.mark.parametrize(("chunk_size", "block_size"), [(8, 16), (16, 16), (32, 16)])
@pytest.mark.parametrize("seed", range(6))
def test_regions_agree_with_the_projections_along_a_random_walk(seed: int, chunk_size: int, block_size: int) -> None:
    """No region refuses what happens in a healthy run."""
    driver = play_seed(seed, 70, chunk_size=chunk_size, block_size=block_size)
    check_regions(driver.sink.events(), driver.configuration)
