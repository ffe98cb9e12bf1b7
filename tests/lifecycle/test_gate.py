"""What is illegal is recorded, named once, and hardly folded: every state, every event, every projection.

A request is put into each pair of phase and blocks by hand, in the middle of a story in which every projection knows
something about it.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import attrs
import msgspec
import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import Core, Replay, RequestState, log_header
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit
from kvledger.lifecycle.events import trigger_of, triggers_of
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.snapshots import capture
from kvledger.lifecycle.states import BlocksRegion
from kvledger.lifecycle.table import Gating

CORE = Core.standard()
LEGAL = CORE.compiled.legal
STANDINGS = list(product(RequestState, BlocksRegion))
GATED = (
    e.ChunkKeysObserved("a", 5, keys_of("other", 2)),
    e.LookupRequested("a", 16, 50, 900),
    e.BlocksAllocated("a", (70, 71, 72), 0, 900),
    e.BlockTableObserved("a", (70, 71, 72), 900),
    e.RequestPreempted("a", 32, 900),
    e.SessionContinued("a", 0, 60, 60, 900),
    e.SessionContinued("a", 32, 60, 60, 900),
    e.TokensRolledBack("a", 0, 900),
    e.TokensRolledBack("a", 16, 900),
    e.WindowLeft("a", 32, 900),
)
"""One of every observation that may be refused, in each of its variants."""


def story() -> Driver:
    """`a` holds blocks, has an answer that was taken up and one that was not, a tail, a save and a load in flight."""
    driver = Driver(num_slots=12, save_tails=True, async_saves=True, keep_for_preempted=True)
    keys = keys_of("document", 6)
    driver.save_prefix("before", keys[:2])
    driver.arrive("a", 40, keys[:5])
    driver.lookup("a", 0, 40)
    driver.allocate("a", (1, 2, 3), 16)
    driver.step(("a", 16, 24, 40), settled=[("a", 0, 16)])
    driver.settle_all()
    driver.step(settled=[("a", 2, 36)])
    driver.preempt("a", 36)
    driver.lookup("a", 0, 40)
    driver.allocate("a", (4, 5, 6), 16)
    return driver


def placed(standing: tuple[RequestState, BlocksRegion]) -> Driver:
    """The same, with `a` in these states."""
    driver = story()
    driver.record("a").state, driver.record("a").blocks = standing
    return driver


def parts(projections: Projections) -> dict[str, Any]:
    """Everything that is believed, by projection."""
    found: dict[str, Any] = msgspec.msgpack.decode(capture(projections))
    return found


def gated_classes() -> set[type[e.Event]]:
    """Observations about one request that are not legal everywhere."""
    return {
        event
        for event in CORE.request_events
        if not event.is_decision and event.id not in CORE.gating.never
        if any(standing not in LEGAL[trigger] for trigger in triggers_of(event) for standing in STANDINGS)
    }


def test_every_observation_that_may_be_refused_is_tried() -> None:
    """And the closed fold speaks of each of them."""
    assert {type(event) for event in GATED} == gated_classes()
    assert {event.id for event in gated_classes()} == set(CORE.gating.closed_fold)
    assert {trigger_of(event) for event in GATED} == {trigger_of(event) for event in GATED} & set(LEGAL)
    projections = Driver().projections
    assert {name for names in CORE.gating.closed_fold.values() for name in names} <= set(vars(projections))


def test_the_story_leaves_something_in_each_projection() -> None:
    """Otherwise nothing could be seen to stay."""
    believed, empty = parts(story().projections), parts(Driver().projections)
    assert {name for name in believed if believed[name] == empty[name]} <= {
        *("extensions", "policy", "unfilled", "save_cursor")
    }


@pytest.mark.parametrize("event", GATED, ids=trigger_of)
def test_of_what_is_illegal_only_the_closed_fold_is_taken_up(event: Any) -> None:
    """Every state, every projection; what is legal is folded by all."""
    for standing in STANDINGS:
        driver = placed(standing)
        before = parts(driver.projections)
        driver.projections.fold(event, 500)
        after = parts(driver.projections)
        changed = {name for name in after if after[name] != before[name]}
        if standing not in LEGAL[trigger_of(event)]:
            assert changed <= set(CORE.gating.closed_fold[event.id]), standing
            continue
        whole = placed(standing).projections
        for fold in whole.folds_of(type(event)):
            fold(event, 500)
        assert after == parts(whole), standing


@pytest.mark.parametrize("event", GATED, ids=trigger_of)
def test_what_is_illegal_is_named_once_and_quarantines_and_decides_nothing(event: Any) -> None:
    """The second time the request is helped no more anyway."""
    for standing in STANDINGS:
        driver = placed(standing)
        decisions = driver.observe(event)
        rules = [decision.rule for decision in decisions if isinstance(decision, e.InvariantViolated)]
        if standing in LEGAL[trigger_of(event)]:
            assert "LEGAL_TRANSITION" not in rules, standing
            continue
        assert [decision.id for decision in decisions] == ["invariant.violated", "request.quarantined"], standing
        assert rules == ["LEGAL_TRANSITION"]
        assert driver.record("a").trust == "quarantined"
        if (driver.record("a").state, driver.record("a").blocks) not in LEGAL[trigger_of(event)]:
            assert driver.observe(event) == []


@pytest.mark.parametrize("event", GATED, ids=trigger_of)
def test_a_replay_and_an_audit_see_what_the_ledger_saw(event: Any) -> None:
    """The same gate, the same fold, the same decisions, one violation."""
    for standing in STANDINGS:
        driver = placed(standing)
        first = driver.ledger.next_sequence
        driver.observe(event)
        driver.observe(event)
        driver.ledger.commit()
        events = [(sequence, each) for sequence, each in driver.sink.events() if sequence >= first]
        replay = Replay(CORE, driver.configuration, reference=CORE.reference, start=placed(standing).projections)
        replay.run(events)
        assert replay.divergences == []
        assert replay.reference_differences == []
        assert parts(replay.projections) == parts(driver.projections)
        audit = Audit(CORE, driver.configuration, start=placed(standing).projections)
        audit.run(events)
        recorded = [each.rule for _, each in events if isinstance(each, e.InvariantViolated)]
        named = [violation for violation in audit.violations if violation.rule == "LEGAL_TRANSITION"]
        assert len(named) == recorded.count("LEGAL_TRANSITION"), standing


def test_who_gets_blocks_has_them_whatever_its_phase() -> None:
    """They may be anybody's next, and a failure of a load has to find whoever reads them."""
    for event in (e.BlocksAllocated("a", (70, 71), 0, 900), e.BlockTableObserved("a", (70, 71), 900)):
        for standing in STANDINGS:
            driver = placed(standing)
            driver.observe(event)
            assert list(driver.projections.blocks.held("a")) == [70, 71]
            assert driver.record("a").blocks != "none"


def test_who_loses_blocks_has_lost_them_and_is_another_generation() -> None:
    """Also where the preemption could not be: vLLM counts it, and what was issued before concerns the life before."""
    for standing in STANDINGS:
        driver = placed(standing)
        before = attrs.evolve(driver.record("a"))
        driver.observe(e.RequestPreempted("a", 32, 900))
        record = driver.record("a")
        assert list(driver.projections.blocks.held("a")) == []
        assert (record.generation, record.num_preemptions) == (before.generation + 1, before.num_preemptions + 1)
        assert record.blocks == "none"


def test_a_lookup_of_who_computes_takes_no_block_away() -> None:
    """It could not be asked if the blocks were not its own; whatever was missed, nobody else has them."""
    driver = placed((RequestState.RUNNING, BlocksRegion.GRANTED))
    driver.observe(e.LookupRequested("a", 16, 50, 900))
    assert list(driver.projections.blocks.held("a")) == [4, 5, 6]
    assert driver.record("a").blocks == "granted"


@pytest.mark.parametrize("state", RequestState)
def test_a_step_is_folded_in_full_and_only_its_illegal_rows_decide_nothing(state: RequestState) -> None:
    """Counts are compressed against what was folded, so a row that was left out would be wrong for ever."""
    driver = placed((state, BlocksRegion.GRANTED))
    driver.start("b", keys_of("b", 2), 16, (20, 21))
    decisions = driver.step(("a", 16, 1, 44), ("b", 16, 1, 17))
    assert driver.projections.tracker.num_computed_tokens(driver.record("a")) == 17
    rules = [decision.rule for decision in decisions if isinstance(decision, e.InvariantViolated)]
    if (state, BlocksRegion.GRANTED) in LEGAL["tokens.scheduled"]:
        assert rules == []
        return
    assert rules == ["LEGAL_TRANSITION"]
    assert driver.record("a").trust == "quarantined"
    assert driver.step(("a", 17, 1, 44)) == [] or state is RequestState.PREEMPTED


def test_who_is_scheduled_while_it_is_thought_preempted_is_recovering() -> None:
    """A failed hook hid that it was given blocks; named once, it goes on without the cache."""
    driver = placed((RequestState.PREEMPTED, BlocksRegion.NONE))
    decisions = driver.step(("a", 16, 4, 44))
    assert [decision.id for decision in decisions] == ["invariant.violated", "request.quarantined"]
    assert (driver.record("a").state, driver.record("a").blocks) == ("recovering", "granted")
    decisions = driver.step(("a", 20, 24, 44))
    assert [decision.id for decision in decisions] == ["prefill.completed"]


def test_a_ledger_refuses_as_its_own_core_says() -> None:
    """And who gates in another way has another fingerprint, also in the header of its logs."""
    other = attrs.evolve(CORE, gating=Gating(resync={}, closed_fold={}, never=("request.finished",)))
    for core, generation in ((CORE, 2), (other, 1)):
        driver = Driver(core=core)
        driver.arrive("a", 40)
        driver.observe(e.RequestPreempted("a", 0, 2))
        driver.observe(e.RequestPreempted("a", 0, 3))  # illegal: it is preempted already
        assert driver.record("a").generation == generation
    assert other.fingerprint() != CORE.fingerprint()
    assert log_header(other, driver.configuration)["table_fingerprint"] != CORE.table_fingerprint()


def test_an_unknown_request_is_named_and_leaves_no_trace() -> None:
    """Nobody can be quarantined."""
    for event in GATED:
        driver = story()
        ghost = msgspec.structs.replace(event, request_id="ghost")
        driver.projections.tracker.state.time_ns = 900  # which is the event's
        before = driver.projections.snapshot()
        driver.projections.fold(ghost, 500)
        assert driver.projections.snapshot() == before
        decisions = driver.observe(ghost)
        assert [decision.id for decision in decisions] == ["invariant.violated"]


def test_what_ends_or_begins_or_reports_is_never_refused() -> None:
    """Whatever the states, these are folded in full."""
    projections = Driver().projections
    refusable = {event.id for event in CORE.events.values() if projections.gated(event)}
    assert refusable == {event.id for event in gated_classes()}
