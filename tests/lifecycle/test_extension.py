"""Extensions from outside: sub-states, events, handlers, rules; and what a reader without their code makes of a log."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import msgspec
import pytest
from lifecycle_driver import Driver, keys_of, play_seed
from lifecycle_driver.concerned import figures_of
from starvation_guard import StarvationGuard, Starving, StarvingKept, Watching
from transitions import Machine

from kvledger.lifecycle import Core, CoreError, Extension, ProjectionSpec, RequestState, StateHandler, Turn
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit
from kvledger.lifecycle.codec import EventDecoder, encode_events, vocabulary_header
from kvledger.lifecycle.events import trigger_of
from kvledger.lifecycle.projections import CORE_PROJECTIONS

CORE = Core.standard().extended(StarvationGuard())


def preempted_twice(core: Core = CORE) -> Driver:
    """A request that is preempted, recovers, and is preempted again."""
    driver = Driver(chunk_size=16, core=core)
    driver.start("a", keys_of("a", 2), 33, (1, 2, 3))
    driver.step(settled=[("a", 0, 32)])
    driver.settle_all()
    for blocks in ((4, 5, 6), None):
        driver.preempt("a", 32)
        driver.settle_all()
        if blocks:
            driver.lookup("a", 0, 34)
            driver.allocate("a", blocks, 32)
            driver.settle_all()
            driver.step(("a", 32, 2, 34))
            driver.settle_all()
    return driver


def test_an_event_of_an_extension_moves_its_sub_state_and_not_the_state() -> None:
    """`record.state` stays the phase; the sub-state is a field beside it."""
    driver = preempted_twice()
    (said,) = driver.all_of(e.ExtensionDecided)
    assert StarvationGuard.payload_of(said) == Starving(2)
    record = driver.projections.tracker.get("a")
    assert record is not None
    assert (record.state, record.sub, record.path) == (RequestState.PREEMPTED, "starving", "preempted.starving")


def test_a_sub_state_goes_on_where_a_row_leads_and_ends_where_none_does() -> None:
    """Blocks lead to recovering.starving; the first step after that leaves it."""
    driver = preempted_twice()
    driver.lookup("a", 0, 34)
    driver.allocate("a", (7, 8, 9), 32)
    record = driver.projections.tracker.get("a")
    assert record is not None
    assert record.path == "recovering.starving"
    driver.settle_all()
    driver.step(("a", 32, 2, 34))
    assert record.path == "running"


def reference_of(core: Core) -> Machine:
    """The rows of the phase and of all extensions, run by `transitions`; a sub-state is left where its phase is."""
    of_extensions = {(source, trigger): dest for each in core.extensions for source, trigger, dest in each.rows}
    paths = {RequestState(state).value for state in RequestState} | {
        end for (source, _), dest in of_extensions.items() for end in (source, dest)
    }
    rows = dict(of_extensions)
    for source, trigger, dest in core.regions[0].flat():
        for path in (each for each in paths if each.partition(".")[0] == source):
            from_phase = of_extensions.get((source, trigger))
            rows.setdefault((path, trigger), from_phase or (path if source is dest else dest.value))
    return Machine(
        model=None,
        states=sorted(paths),
        transitions=[{"trigger": each[1], "source": each[0], "dest": dest} for each, dest in rows.items()],
        initial=RequestState.NEW.value,
        auto_transitions=False,
    )


@pytest.mark.parametrize("seed", range(6))
def test_a_machine_that_runs_the_rows_goes_where_the_fold_goes(seed: int) -> None:
    """Upon every event about a request, in a crowd that is preempted again and again."""

    class Path:
        """What the machine moves."""

        def __init__(self, state: str) -> None:
            self.state = state

    driver = play_seed(
        seed, 150, chunk_size=16, block_size=16, core=CORE, extensions={"starvation": {"num_preemptions": 1}}
    )
    machine, projections = reference_of(CORE), CORE.new_projections(driver.configuration)
    seen = set()
    for sequence, event in enumerate(driver.observed, 1):
        record = projections.tracker.get(event.request_id) if isinstance(event, e.RequestEvent) else None
        is_of_another_life = (
            isinstance(event, e.RequestDecision)
            and record is not None
            and record.life != (event.request_id, event.ordinal, event.generation)
        )
        path = None if record is None else Path(record.path)
        projections.fold(event, sequence)
        if path is None or isinstance(event, e.RequestArrived | e.RequestReleased) or is_of_another_life:
            continue
        of_extension = isinstance(event, e.ExtensionObserved | e.ExtensionDecided)
        trigger = f"{event.extension}/{event.name}" if of_extension else trigger_of(event)
        if trigger in machine.events and machine.get_triggers(path.state).count(trigger):
            machine.events[trigger].trigger(path)
        assert record is not None
        assert record.path == path.state, (sequence, event)
        seen.add(record.path)
    assert {"preempted.starving", "recovering.starving", "running"} <= seen


def test_settings_stand_in_the_configuration() -> None:
    """They are in every log's header, so replay decides with the same."""
    driver = Driver(core=CORE, extensions={"starvation": {"num_preemptions": 1}})
    driver.start("a", keys_of("a", 2), 17, (1, 2))
    driver.preempt("a", 0)
    assert len(driver.all_of(e.ExtensionDecided)) == 1


def audited(driver: Driver, core: Core) -> Audit:
    """The driver's log, audited with a core."""
    driver.ledger.commit()
    audit = Audit(core, driver.configuration)
    audit.run(driver.sink.events())
    return audit


def test_a_log_is_verified_with_its_extension() -> None:
    """Its decisions are made again, and its rule is held against the log."""
    audit = audited(preempted_twice(), CORE)
    assert audit.is_sound, (audit.violations, audit.divergences)
    assert StarvingKept.rule in CORE.rules
    assert audit.judgement().num_unjudged == 0


def test_a_reader_without_the_extension_verifies_the_rest() -> None:
    """It walks the sub-states by the rows of the header, counts the events, and says what it could not judge."""
    driver = preempted_twice()
    core = Core.standard().reading(vocabulary_header(CORE))
    assert [extension.name for extension in core.absent] == ["starvation"]
    audit = audited(driver, core)
    assert audit.is_sound, (audit.violations, audit.divergences)
    assert audit.judgement().num_unjudged > 0
    record = audit.projections.tracker.get("a")
    assert record is not None
    assert record.path == "preempted.starving"
    assert figures_of(driver.sink.events(), driver.configuration, core).num_extension_events == 1
    without_header = audited(driver, Core.standard())
    assert without_header.divergences


def test_a_reader_that_has_it_reads_with_it() -> None:
    """An extension that is installed is taken where a log names it, and left alone elsewhere."""
    available = [StarvationGuard()]
    assert Core.standard().reading(vocabulary_header(CORE), available).extensions == tuple(available)
    assert Core.standard().reading(vocabulary_header(Core.standard()), available).extensions == ()
    assert CORE.reading(vocabulary_header(CORE)).absent == ()


def test_its_events_are_in_the_log_as_they_were() -> None:
    """Encoded like any other event."""
    events = preempted_twice().all_of(e.ExtensionDecided)
    decoder = EventDecoder(CORE, vocabulary_header(CORE))
    assert decoder.decode(encode_events(events)) == events


def test_loaded_twice_is_loaded_once() -> None:
    """By configuration and by entry point, for instance."""
    assert CORE.extended(StarvationGuard(), StarvationGuard()) is CORE


def changed(**parts: Any) -> Extension:
    """The guard with other parts, under another name unless one is given."""
    kind = type("Changed", (StarvationGuard,), {"name": "changed", "rules": {}, "rows": (), "projections": (), **parts})
    extension: Extension = kind()
    return extension


@pytest.mark.parametrize(
    ("extension", "message"),
    [
        (
            changed(name="starvation"),
            r"extension starvation 1 of .*Changed has the same name as version 1 of .*StarvationGuard",
        ),
        (
            changed(rules=StarvationGuard.rules),
            "extension changed: extension starvation has a rule STARVING_KEPT already; choose another name",
        ),
        (changed(rules={"LEGAL_TRANSITION": StarvingKept}), "changed: the core has a rule LEGAL_TRANSITION already"),
        (changed(projections=StarvationGuard.projections), "extension starvation has a projection starving already"),
        *(
            (
                changed(projections=(ProjectionSpec(name, lambda _its: Any),)),
                f"changed: the core has a projection {name} already",
            )
            for name in ("tracker", "sub_states")
        ),
        *(
            (
                changed(rows=(("preempted", "changed/starving", dest),)),
                "starvation and changed both have sub-states of preempted, .*; load one of them",
            )
            for dest in ("preempted.starving", "preempted.waiting")
        ),
        (
            changed(rows=(("preempted", "blocks.allocated", "preempted.x"),)),
            r"leads from preempted to recovering; a sub-state's row must lead to the same phase",
        ),
        (changed(rows=(("running", "blocks.held", "running.x"),)), "leads from running nowhere, because it is illegal"),
        (
            changed(rows=(("running", "changed/nothing", "running.x"),)),
            "leads from running nowhere",
        ),
        (changed(rows=(("running.x", "changed/starving", "running"),)), "no row enters running.x"),
        (changed(rows=(("walking", "changed/starving", "walking.x"),)), "walking is not a phase"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(extension: Extension, message: str) -> None:
    """When the core is composed, not in the middle of a log."""
    with pytest.raises(CoreError, match=message):
        CORE.extended(extension)


class Nameless(Extension):
    """Its author forgot."""


class Stateless(StateHandler):
    """Its author forgot, too."""


ATTRIBUTES = {
    name
    for name in set(dir(preempted_twice().projections)) - {spec.name for spec in CORE.projections}
    if not name.startswith("__")
}


@pytest.mark.parametrize(
    ("extension", "message"),
    [
        *(
            (
                type("Misspelt", (Extension,), {"name": "misspelt", unknown: ()})(),
                f"misspelt: its attribute {unknown} is not a part of .*; did you mean {meant}.",
            )
            for unknown, meant in {
                **{part[:-1]: part for part in ("handlers", "events", "rows", "rules", "projections")},
                "keep": "keeps",
                "replace": "replaces",
                "leave_out": "leaves_out",
                "word": "words",
            }.items()
        ),
        (Nameless(), "Nameless: its name '' is not a valid name; use letters"),
        *(
            (changed(name=name), f"its name {name!r} is not a valid name")
            for name in ("a/b", "tokens.rolled_back", "a b", 7)
        ),
        (changed(events={"a/b": Starving}), "changed: its event 'a/b' is not a valid name"),
        (changed(events={"starving": dict}), "its event starving is <class 'dict'>; name a class .* msgspec.Struct"),
        (
            changed(events={"starving": Starving(1)}),
            r"its event starving is Starving\(num_preemptions=1\); name a class",
        ),
        (changed(version="1"), "changed: its version is '1'; make it a whole number"),
        (
            changed(rules={"STARVING_KEPT_TOO": None}),
            "its rule STARVING_KEPT_TOO is None; give the class of its checker",
        ),
        (changed(rows=(("preempted", "changed/starving"),)), "its row .* is not .source, trigger, dest.; write a"),
        (changed(handlers=Watching), "its handlers are <class .*Watching'>; use a tuple"),
        (changed(handlers=("watching:Watching",)), "its handler 'watching:Watching' is not a handler; name a class"),
        (changed(handlers=(Stateless(),)), "its handler <.*Stateless object at .*> is not a handler; name a class"),
        (changed(handlers=(Stateless,)), "its handler Stateless has no state; write `state = RequestState"),
        (
            changed(projections=(Watching,)),
            "its projection <class .*Watching'> is not a projection; use a ProjectionSpec",
        ),
        *(
            (changed(projections=(ProjectionSpec(name, lambda _its: Any),)), f"its projection {name!r} would hide")
            for name in sorted(ATTRIBUTES - {*CORE_PROJECTIONS})
        ),
    ],
)
def test_a_part_that_is_none_is_refused_by_name(extension: Extension, message: str) -> None:
    """With the reason and the remedy, before anything is asked of it or written about it."""
    with pytest.raises(CoreError, match=f"^extension .*{message}"):
        CORE.extended(extension)


def test_an_extension_may_have_attributes_of_its_own() -> None:
    """Also one that is a letter off a part that it has, or begins with an underscore."""
    parts = {"event": Starving, "events": {"starving": Starving}, "_handler": 1, "handles": 2, "decide": 3}
    CORE.extended(changed(**parts))


def test_a_decision_of_an_extension_that_is_not_loaded_is_refused() -> None:
    """Nobody could read it; its request pays, the log stays readable."""

    class Other(Extension):
        name = "other"
        events: ClassVar[dict[str, type[msgspec.Struct]]] = {"starving": Starving}

    class Wrong(Watching):
        state = RequestState.RUNNING

        def request_preempted(self, turn: Turn, _event: e.RequestPreempted) -> None:
            turn.decide(Other.decided(turn, Starving(1)))

    driver = Driver(core=CORE.adding(Wrong()))
    driver.start("a", keys_of("a", 2), 17, (1, 2))
    driver.preempt("a", 0)
    assert driver.all_of(e.ExtensionDecided) == []
    (violation,) = driver.all_of(e.InvariantViolated)
    assert (violation.rule, violation.request_id) == ("HANDLER_CONTRACT", "a")


def test_chunks_that_an_extension_keeps_are_evicted_after_all_others() -> None:
    """The oldest go first otherwise."""
    kept = keys_of("old", 1)

    class Keeping(Extension):
        name = "keeping"

        def keeps(self, _projections: Any, key: bytes) -> bool:
            return key in kept

    evicted = []
    for core in (Core.standard(), Core.standard().extended(Keeping())):
        driver = Driver(chunk_size=16, num_slots=2, core=core)
        for name, block in (("old", 1), ("young", 3), ("new", 5)):
            driver.start(name, keys_of(name, 1), 17, (block, block + 1))
            driver.step(settled=[(name, 0, 16)])
            driver.settle_all()
            driver.finish(name, 17, 18)
            driver.settle_all()
        evicted.append([key for event in driver.all_of(e.ChunksEvicted) for key in event.keys])
    assert evicted == [list(kept), list(keys_of("young", 1))]


def test_an_extension_is_asked_about_chunks_that_are_in_the_pool_and_no_others() -> None:
    """A chunk that a failed load tainted keeps its place while one after it is there, and has no slots."""
    asked = []

    class Keeping(Extension):
        name = "keeping"

        def keeps(self, projections: Any, key: bytes) -> bool:
            asked.append(projections.pool.get(key))
            return False

    driver = Driver(chunk_size=16, num_slots=4, save_tails=False, core=Core.standard().extended(Keeping()))
    keys = keys_of("d", 3)
    driver.save_prefix("a", keys)
    driver.arrive("b", 33, keys[:2])
    driver.lookup("b", 16, 33)
    driver.allocate("b", (1, 2, 3), 16)
    driver.report(driver.all_of(e.LoadIssued)[-1].job_id, ok=False)
    driver.finish("b", 0, 33)
    driver.settle_all()
    driver.save_prefix("new", keys_of("new", 4), first_block=300)
    assert len(asked) == 2
    assert all(asked)


def test_a_header_says_all_of_an_extension_that_is_data() -> None:
    """Name, version, events, rows, handlers' methods, rules."""
    (declared,) = vocabulary_header(CORE)["extensions"]  # type: ignore[misc]
    assert declared["name"] == "starvation"
    assert declared["rows"] == StarvationGuard.rows
    assert ("running", "request_preempted") in declared["hooks"]
    assert declared["keeps"]
    assert declared == attrs.asdict(StarvationGuard().declaration())
