"""An extension whose code raises is stopped: nobody else pays for it, and every reader of the log agrees."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from lifecycle_driver import Driver, keys_of
from starvation_guard import StarvationGuard, Starving, StarvingRequests, Watching

from kvledger.lifecycle import Core, Extension, Projections, ProjectionSpec, RequestState, TrustRegion, Turn, on
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit
from kvledger.lifecycle.codec import vocabulary_header
from kvledger.lifecycle.handler_contract import DecisionRefused
from kvledger.lifecycle.snapshots import capture, restore

QUOTED = "the prompt begins with"


class Broken(RuntimeError):
    """What the extensions here raise."""

    def __init__(self) -> None:
        super().__init__(QUOTED)


class RaisesBehindItsDecision(Watching):
    """Says who is starving, and then fails."""

    state = RequestState.RUNNING

    def request_preempted(self, turn: Turn, event: e.RequestPreempted) -> None:
        """Decide, then raise."""
        super().request_preempted(turn, event)
        if turn.record.num_preemptions > 1:
            raise Broken


class DecidesWhatItMayNot(Watching):
    """Takes what follows from a report for its own business."""

    state = RequestState.RUNNING

    def request_preempted(self, turn: Turn, _event: e.RequestPreempted) -> None:
        """Stop another extension, for instance."""
        turn.decide(e.ExtensionStopped("starvation", 1, "", "", turn.cause))


class TriesAgain(Watching):
    """Goes on whatever happens to it."""

    state = RequestState.RUNNING

    def request_preempted(self, turn: Turn, _event: e.RequestPreempted) -> None:
        """Say it three times."""
        for num_preemptions in (1, 2, 3):
            with suppress(DecisionRefused):
                turn.decide(StarvationGuard.decided(turn, Starving(num_preemptions)))


class FoldsNoDecision(StarvingRequests):
    """Fails when it takes up what its handlers said, half way."""

    def _starves(self, event: e.ExtensionDecided, sequence: int) -> None:
        super()._starves(event, sequence)
        raise Broken

    def index(self) -> None:
        """Nor can it be made anew from its state."""
        raise Broken


class FoldsNoPreemption(StarvingRequests):
    """Fails when it takes up an observation."""

    @on(e.RequestPreempted)
    def _preempted(self, event: e.RequestPreempted, _sequence: int) -> None:
        self.state.starving[0] = event.request_id
        raise Broken


def raising(_extension: Extension, _projections: Any, _key: bytes) -> None:
    """Instead of saying what is kept."""
    raise Broken


def altered(**parts: Any) -> Extension:
    """The guard with other parts, which is the guard to every reader."""
    kind = type("Altered", (StarvationGuard,), parts)
    extension: Extension = kind()
    return extension


def folding(projection: Callable[[], Any], *handlers: type[Watching]) -> Extension:
    """The guard with another projection."""
    spec = ProjectionSpec("starving", lambda _its: projection())
    return altered(projections=(spec,), handlers=handlers or StarvationGuard.handlers)


def kept_by(projections: Projections) -> list[bytes]:
    """The chunks in the pool that an extension wants to keep."""
    keeps = projections.keeper()
    return [] if keeps is None else list(filter(keeps, projections.pool))


GUARD = StarvationGuard()
FAULTY = {
    "a handler": (altered(handlers=(RaisesBehindItsDecision,)), "RaisesBehindItsDecision.request_preempted"),
    "a handler's decision": (altered(handlers=(DecidesWhatItMayNot,)), "DecidesWhatItMayNot.request_preempted"),
    "a fold of a decision": (folding(FoldsNoDecision), "projection starving"),
    "a fold, and the handler goes on": (folding(FoldsNoDecision, TriesAgain), "projection starving"),
    "a fold of an observation": (folding(FoldsNoPreemption), "projection starving"),
    "what is kept": (altered(keeps=raising), "keeps"),
}
"""What raises -> the extension, and where it is said to have raised."""
MENDED = dict.fromkeys(FAULTY, GUARD) | {"a fold, and the handler goes on": folding(StarvingRequests, TriesAgain)}
EACH = pytest.mark.parametrize("what", FAULTY)


def lived(*extensions: Extension) -> Driver:
    """Requests in a pool with too little room, preempted twice each; the last one is still there."""
    driver = Driver(chunk_size=16, num_slots=4, core=Core.standard().extended(*extensions), keep_for_preempted=False)
    for number in range(4):
        name, first = f"request {number}", 1 + 10 * number
        driver.start(name, keys_of(name, 2), 33, (first, first + 1, first + 2))
        driver.step(settled=[(name, 0, 32)])
        driver.settle_all()
        for _ in range(2):
            driver.preempt(name, 32)
            driver.settle_all()
            num_hit = driver.lookup(name, 0, 34).num_external_tokens
            driver.allocate(name, (first + 3, first + 4, first + 5), num_hit)
            driver.settle_all()
            driver.step((name, num_hit, 34 - num_hit, 34))
            driver.settle_all()
        if number < 3:
            driver.finish(name, 34, 35)
            driver.settle_all()
    return driver


def without_extensions(driver: Driver) -> list[e.Event]:
    """What was recorded, but for what extensions said, in the order and without the numbers of events."""
    of_extensions = (e.ExtensionDecided, e.ExtensionStopped)
    return [
        event if not hasattr(event, "cause") else type(event)(*(getattr(event, name) for name in _but_cause(event)), 0)
        for event in driver.observed
        if not isinstance(event, of_extensions)
    ]


def _but_cause(event: e.Event) -> list[str]:
    return [name for name in event.__struct_fields__ if name != "cause"]


def audited(driver: Driver, core: Core) -> Audit:
    """The driver's log, audited with a core."""
    driver.ledger.commit()
    audit = Audit(core, driver.configuration)
    audit.run(driver.sink.events())
    return audit


@EACH
def test_it_is_stopped_once_and_nobody_else_pays(what: str) -> None:
    """The log goes on like one without it, and says where it raised and what, without quoting the error."""
    extension, where = FAULTY[what]
    driver = lived(extension)
    (stopped,) = driver.all_of(e.ExtensionStopped)
    assert (stopped.extension, stopped.extension_version, stopped.where) == ("starvation", 1, where)
    assert stopped.error.startswith(("Broken in ", "DecisionRefused in ")), stopped.error
    assert QUOTED not in stopped.error
    assert type(driver.observed[stopped.cause - 1]) in {e.RequestPreempted, e.StepScheduled}
    assert driver.all_of(e.InvariantViolated) == driver.all_of(e.RequestQuarantined) == []
    assert driver.record("request 3").trust is TrustRegion.TRUSTED
    assert driver.all_of(e.ChunksEvicted), "nothing was evicted, so nobody was asked what is kept"
    if where != "keeps":  # which came after others had been kept
        assert without_extensions(driver) == without_extensions(lived())
    assert driver.totals.figures.num_extensions_stopped == 1


@EACH
def test_from_then_on_it_takes_no_part(what: str) -> None:
    """Its handlers say no more, its projections are empty, nobody is in its sub-states."""
    driver = lived(FAULTY[what][0])
    (stopped,) = (number for number, event in enumerate(driver.observed) if isinstance(event, e.ExtensionStopped))
    assert not [event for event in driver.observed[stopped:] if isinstance(event, e.ExtensionDecided)]
    driver.preempt("request 3", 34)
    assert driver.record("request 3").path == "preempted"
    assert len(driver.projections.starving) == 0
    assert not kept_by(driver.projections)


def test_a_request_in_its_sub_state_is_in_the_phase_again() -> None:
    """At the very event; and what is observed of the extension leads nowhere afterwards."""

    class SaysSoAgain(Watching):
        state = RequestState.PREEMPTED

        def extension_observed(self, _turn: Turn, _event: e.ExtensionObserved) -> None:
            raise Broken

    driver = lived(altered(handlers=(*StarvationGuard.handlers, SaysSoAgain)))
    driver.preempt("request 3", 34)
    assert driver.record("request 3").path == "preempted.starving"
    for _ in range(2):
        driver.observe(StarvationGuard.observed("request 3", Starving(3), 10**12))
        assert driver.record("request 3").path == "preempted"
    assert len(driver.all_of(e.ExtensionStopped)) == 1


@EACH
@pytest.mark.parametrize("reader", ["itself", "mended", "without", "from a snapshot"])
def test_every_reader_agrees(what: str, reader: str) -> None:
    """One whose code raises as well, one whose code does not, one without the code, one that begins in the middle."""
    driver = lived(FAULTY[what][0])
    core: Core = driver.ledger.core
    if reader == "mended":
        core = Core.standard().extended(MENDED[what])
    elif reader == "without":
        core = Core.standard().reading(vocabulary_header(core))
    audit = audited(driver, core)
    assert audit.is_sound, (audit.violations, list(audit.divergences), audit.unfoldable)
    projections = audit.projections
    if reader == "from a snapshot":
        projections = restore(core, capture(projections), driver.configuration)
        projections.fold(e.RequestPreempted("request 3", 34, 34, 10**12), 10**6)
        assert not kept_by(projections)
    else:
        states, live = projections.snapshot(), driver.projections.snapshot()
        assert states == {name: live[name] for name in states}
    assert projections.extensions.state.stopped


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("a handler", r"Broken in request_preempted, test_stopped_extensions\.py:\d+"),
        ("what is kept", r"Broken in raising, test_stopped_extensions\.py:\d+"),
        (
            "a handler's decision",
            r"DecisionRefused in request_preempted, test_stopped_extensions\.py:\d+: ExtensionStopped is no .*",
        ),
    ],
)
def test_the_log_names_the_line_of_the_extension_and_why_its_decision_was_refused(what: str, error: str) -> None:
    """Not kvledger's line that refused it; and no message but kvledger's own."""
    (stopped,) = lived(FAULTY[what][0]).all_of(e.ExtensionStopped)
    assert re.fullmatch(error, stopped.error), stopped.error


def test_one_that_raises_where_the_log_does_not_say_so_diverges() -> None:
    """The reader's code is not the writer's; it is named once, and the log is read to its end."""
    driver = lived(StarvationGuard())
    assert driver.all_of(e.ExtensionStopped) == []
    for extension, where in FAULTY.values():
        audit = audited(driver, Core.standard().extended(extension))
        assert audit.unfoldable is None
        said = [each.decided for each in audit.divergences if isinstance(each.decided, e.ExtensionStopped)]
        assert [each.where for each in said] == [where]
        assert audit.num_events == len(driver.observed)


def test_of_two_extensions_only_the_one_that_raises_is_stopped() -> None:
    """Whichever is asked first."""

    class Other(StarvationGuard):
        name = "other"
        rows = ()
        projections = ()
        handlers = (RaisesBehindItsDecision,)
        rules = {}  # noqa: RUF012 -- as its parent's

        def keeps(self, _projections: Any, _key: bytes) -> bool:
            return False

    for extensions in ([StarvationGuard(), Other()], [Other(), StarvationGuard()]):
        driver = lived(*extensions)
        assert [stopped.extension for stopped in driver.all_of(e.ExtensionStopped)] == ["other"]
        assert len(driver.all_of(e.ExtensionDecided)) >= 4
        assert audited(driver, driver.ledger.core).is_sound


def test_it_is_recorded_with_the_event_upon_which_it_raised() -> None:
    """Also where nobody decides anything upon that, so that it is written before vLLM is told of it."""

    class FoldsNoNote(StarvingRequests):
        @on(e.LogNote)
        def _noted(self, _event: e.LogNote, _sequence: int) -> None:
            raise Broken

    driver = lived(folding(FoldsNoNote))
    (stopped,) = driver.observe(e.LogNote("a word", 10**12))
    assert isinstance(stopped, e.ExtensionStopped)
    assert stopped.cause == len(driver.observed) - 1
    assert audited(driver, Core.standard().extended(GUARD)).is_sound
