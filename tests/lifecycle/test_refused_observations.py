"""What is illegal is recorded, named once, and hardly folded: every state, every event, every projection.

A request is put into each pair of phase and blocks by hand, in the middle of a story in which every projection knows
something about it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from copy import copy
from itertools import product
from typing import Any, get_args, get_type_hints

import attrs
import msgspec
import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import Core, Replay, RequestState, log_header
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit, Start
from kvledger.lifecycle.events import RequestEvent, trigger_of, triggers_of
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.snapshots import capture
from kvledger.lifecycle.states import BlocksRegion
from kvledger.lifecycle.table import Gating

CORE = Core.standard()
LEGAL = CORE.tables.legal
STANDINGS = list(product(RequestState, BlocksRegion))


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


def start_in(standing: tuple[RequestState, BlocksRegion]) -> Start:
    """What a log is read with that begins there."""
    folds = story().folded()
    for life in (folds.projections.tracker.get("a"), folds.model.lives.get("a")):
        life.state, life.blocks = standing
    return folds.start()


def busy() -> Driver:
    """The story, and then facts that hardly come together, so that each fold finds something to change."""
    driver = placed((RequestState.PREEMPTED, BlocksRegion.NONE))
    request_id, ordinal, generation = driver.record("a").life
    life: Any = {"request_id": request_id, "ordinal": ordinal, "generation": generation, "cause": 33}
    chunks, tail, _ = (job.job_id for job in driver.projections.jobs)
    facts: tuple[e.Event, ...] = (
        e.SaveCompleted(**life, job_id=tail),
        e.SaveFailed(**life, job_id=chunks, error="not a word of it", quiet=False),
        e.LoadIssued(**life, job_id=6, first_token=0, num_tokens=36, slots=(2,), block_ids=(4, 5, 6), is_async=True),
        e.LoadErrorsObserved((77,), 80_000),
        e.LookupRequested("a", 0, 40, 80_000),
        e.LookupAnswered(
            **life,
            num_computed_tokens=0,
            num_tokens=40,
            num_hit_tokens=16,
            num_external_tokens=16,
            is_async=True,
            miss_reason="missing",
        ),
        e.BlockTableObserved("a", (4, 5, 6), 80_000),
        e.StepScheduled(3, 0, (), (), (), (e.SettledTokens(ordinal, 2, 16),), 80_000),
        e.SaveIssued(**life, job_id=7, chunks=(4,), slots=(5,), block_ids=(6,), before_forward=False, is_async=True),
    )
    for fact in facts:
        driver.projections.fold(fact, 400)
    return driver


BUSY = busy()
REQUEST_ID, ORDINAL, GENERATION = BUSY.record("a").life
NEXT_JOB = BUSY.projections.jobs.next_job_id
JOBS = list(range(3, NEXT_JOB))  # in flight, given up, and one that has ended
KNOWN = pickle.dumps(BUSY.projections.states())
AIMED: dict[str, Any] = {
    "request_id": REQUEST_ID,
    "ordinal": ORDINAL,
    "generation": GENERATION,
    "advanced": ((ORDINAL, 16, 4, 50),),
    "paused": (ORDINAL,),
    "extended": ((ORDINAL, (80,)),),
    "settled": (e.SettledTokens(ORDINAL, 2, 40),),
    **dict.fromkeys(("failed", "sent", "received", "reported"), (ORDINAL,)),
    **dict.fromkeys(("job_ids", "awaited"), tuple(JOBS)),
    "ranks_done": (0,),
    "ranks_failed": (),
    "slots": (2,),
    "block_ids": (5, 70),
    "keys": keys_of("document", 1),
    "first_chunk": 1,
    "num_tokens": 50,
    "is_async": False,
    "hook": "build_connector_meta",
    "time_ns": 90_000,
}
"""Field -> what makes an event one about `a`, about what it holds and what is owed to it."""


def bring(projections: Projections, states: tuple[Any, ...]) -> None:
    """Let these projections know what the busy ones know, and `a` be in these states; 10 times faster than made new."""
    named: dict[str, Any] = dict(projections.named())
    for name, state in pickle.loads(KNOWN).items():  # noqa: S301 -- its own
        named[name].state = state
    for projection in named.values():
        getattr(projection, "index", lambda: None)()
    record = projections.tracker.of(ORDINAL)
    assert record is not None
    record.state, record.blocks, record.first, record.current, record.trust = states


def example_of(annotation: Any) -> Any:
    """Some value of a field's type."""
    simple = {int: 32, str: "text", bytes: keys_of("other", 1)[0], bool: True}
    inner = [each for each in get_args(annotation) if each is not Ellipsis]
    return tuple(map(example_of, inner)) if inner else simple[annotation]


def aimed(event_class: type[e.Event]) -> Iterator[Any]:
    """Events of the class about `a`: in each variant, about each of its jobs, and beginning its life or another."""
    hints = get_type_hints(event_class)
    values = {name: [AIMED[name] if name in AIMED else example_of(hints[name])] for name in e.field_names(event_class)}
    if "job_id" in values:
        values["job_id"] = [NEXT_JOB] if "slots" in values else JOBS
    if event_class.variants is not None:
        (value,) = values[event_class.variants.field]
        values[event_class.variants.field].append(type(value)())  # 0, or not
    if event_class is e.RequestArrived:
        values["ordinal"].append(ORDINAL + 1)
    return (event_class(*chosen) for chosen in product(*values.values()))


GATED = [event for event_id in CORE.gating.closed_fold for event in aimed(CORE.events[event_id])]
"""Every observation that may be refused, in each of its variants."""


def parts(projections: Projections) -> dict[str, Any]:
    """Everything that is believed, by projection."""
    found: dict[str, Any] = msgspec.msgpack.decode(capture(projections))
    return found


def gated_classes() -> set[type[e.Event]]:
    """Observations about one request that are not legal everywhere."""
    return {
        event
        for event in CORE.tables.request_events
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
    assert {name for name in believed if believed[name] == empty[name]} <= {"extensions"}


def is_refused(event: e.Event, states: tuple[Any, ...]) -> bool:
    """Whether it may be, and a reference machine has no row for it."""
    if not isinstance(event, RequestEvent) or event.is_decision or event.id in CORE.gating.never:
        return False
    return not CORE.reference.after(trigger_of(event), states)[1]


def leads_to(event: e.Event, states: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Where the reference machines say that `a` is afterwards; None where it is forgotten."""
    if isinstance(event, e.RequestArrived):
        return tuple(region.initial for region in CORE.regions)
    if isinstance(event, e.RequestReleased):
        return None
    trigger = trigger_of(event)
    if isinstance(event, e.StepScheduled):
        trigger = "tokens.scheduled"
    elif isinstance(event, e.CacheReset) and states[1] is not BlocksRegion.NONE:
        trigger = "cache.reset/held"
    elif is_refused(event, states) and "tracker" not in CORE.gating.closed_fold[event.id]:
        return states
    return CORE.reference.after(trigger, states)[0]


@pytest.mark.parametrize("event_class", CORE.events.values(), ids=lambda event_class: event_class.id)
def test_what_is_illegal_is_folded_by_the_closed_fold_and_everything_else_by_all(event_class: type[e.Event]) -> None:
    """In every standing, trusted or not; nothing raises, and all regions go where the reference machines lead."""
    folded, expected = (CORE.new_projections(BUSY.configuration) for _ in range(2))
    folds = {name: its.folds()[event_class] for name, its in expected.named().items() if event_class in its.folds()}
    never_changed = set(folds)
    others = zip(*(region.states for region in CORE.regions[2:]), strict=True)  # trusted and so on, or the contrary
    for event, standing, beside in product(aimed(event_class), STANDINGS, others):
        states: Any = (*standing, *beside)
        bring(folded, states)
        bring(expected, states)
        before = folded.snapshot()
        folded.fold(event, 500)
        after = folded.snapshot()
        changed = {name for name in after if after[name] != before[name]}
        told: Any = folds
        if is_refused(event, states):
            told = CORE.gating.closed_fold[event.id]
            assert changed <= set(told), (event, states)
        subject = expected.subject_of(event)
        for name, fold in folds.items():
            if name in told:
                fold(event, 500, *(() if name == "owed" else (subject,)))
        assert after == expected.snapshot(), (event, states)
        record = folded.tracker.get(REQUEST_ID)
        assert (None if record is None else record.states) == leads_to(event, states), (event, states)
        # The pool holds slots, and its chunks are pinned in records; jobs change copies that stand in what is owed.
        elsewhere = {"pool": {"slots", "tracker"}, "jobs": {"owed"}}
        never_changed -= changed | {name for name, others in elsewhere.items() if others & changed}
    # A tail that is saved once more stays as it is; the slots know. What steps cost is not measured while one loads.
    # A lookup that is asked again counts what was counted before.
    unchanged = {e.SaveCompleted: {"tracker"}, e.StepScheduled: {"costs"}, e.LookupRequested: {"lookup_cache"}}
    assert never_changed == unchanged.get(event_class, set())


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
        audit = Audit(CORE, driver.configuration, start=start_in(standing))
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
            assert list(driver.record("a").block_ids or ()) == [70, 71]
            assert driver.record("a").blocks != "none"


def test_who_loses_blocks_has_lost_them_and_is_another_generation() -> None:
    """Also where the preemption could not be: vLLM counts it, and what was issued before concerns the life before."""
    for standing in STANDINGS:
        driver = placed(standing)
        before = copy(driver.record("a"))
        driver.observe(e.RequestPreempted("a", 32, 33, 900))
        record = driver.record("a")
        assert list(driver.record("a").block_ids or ()) == []
        assert (record.generation, record.num_preemptions) == (before.generation + 1, before.num_preemptions + 1)
        assert record.blocks == "none"


def test_a_lookup_of_who_computes_takes_no_block_away() -> None:
    """It could not be asked if the blocks were not its own; whatever was missed, nobody else has them."""
    driver = placed((RequestState.RUNNING, BlocksRegion.GRANTED))
    driver.observe(e.LookupRequested("a", 16, 50, 900))
    assert list(driver.record("a").block_ids or ()) == [4, 5, 6]
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
        driver.observe(e.RequestPreempted("a", 0, 40, 2))
        driver.observe(e.RequestPreempted("a", 0, 40, 3))  # illegal: it is preempted already
        assert driver.record("a").generation == generation
    assert other.fingerprint() != CORE.fingerprint()
    assert log_header(other, driver.configuration)["table_fingerprint"] != CORE.table_fingerprint()


def test_an_unknown_request_is_named_and_leaves_no_trace() -> None:
    """Nobody can be quarantined."""
    for event in GATED:
        driver = story()
        ghost = msgspec.structs.replace(event, request_id="ghost")
        driver.projections.tracker.state.time_ns = AIMED["time_ns"]  # which is the event's
        before = driver.projections.snapshot()
        driver.projections.fold(ghost, 500)
        assert driver.projections.snapshot() == before
        decisions = driver.observe(ghost)
        assert [decision.id for decision in decisions] == ["invariant.violated"]


def test_what_ends_or_begins_or_reports_is_never_refused() -> None:
    """Whatever the states, these are folded in full."""
    refusable = {event.id for event in CORE.events.values() if CORE.tables.may_refuse(event)}
    assert refusable == {event.id for event in gated_classes()}
