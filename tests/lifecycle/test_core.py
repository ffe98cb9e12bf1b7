"""A core is made of parts that fit together; what does not is refused with its name, the reason and the remedy."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import ClassVar

import attrs
import msgspec
import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import Core, CoreError, Extension, StateHandler
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import vocabulary_header
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.handlers import HOOKS, Preempted, Running
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.testing.plays import CONFIGURATIONS, OBSERVED, Observed, plays
from kvledger.lifecycle.turn import Turn

CORE = Core.standard()
CONFIGURATION = LedgerConfiguration(block_size=16, chunk_size=16, num_slots=1)
STANDARD_PARTS = {
    *("STANDARD_EVENTS", "REGIONS", "JOB_REGIONS", "GATING", "STANDARD_HANDLERS"),
    *("PROJECTIONS", "RULES", "NOT_CHECKED", "UPCASTERS"),
}


class Shy(Running):
    """Replaces the handler of running requests."""


class Shier(Running):
    """Would, too."""


def test_what_the_standard_core_is_made_of_is_asked_through_a_core_alone() -> None:
    """Who imports a list of parts would not notice that his core has others."""
    folder = Path(inspect.getfile(Core)).parent  # what else there is may import no such list, by import contract
    importing = {
        file.name
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and STANDARD_PARTS & {alias.name for alias in node.names}
    }
    assert importing == {"standard.py"}


def test_the_standard_core_is_one_object() -> None:
    """It is immutable, so everybody may hold the same."""
    assert Core.standard() is CORE
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        CORE.rules = {}  # type: ignore[misc]


def test_replacing_a_handler_makes_another_core() -> None:
    """The one that it was made from stays as it was."""
    shy = Shy()
    core = CORE.replacing(shy)
    assert core.handlers[RequestState.RUNNING] == (shy,)
    assert shy not in CORE.handlers[RequestState.RUNNING]
    assert core.fingerprint() != CORE.fingerprint()
    assert core.replacing(Running()).fingerprint() == CORE.fingerprint()


def test_replacing_a_handler_keeps_what_an_extension_has_added() -> None:
    """An extension is whole or not there; so the order in which a core is made does not matter."""

    class Listening(StateHandler):
        state = RequestState.RUNNING

    class Listens(Extension):
        name = "listens"
        handlers = (Listening,)

    shy = Shy()
    extended_first = CORE.extended(Listens()).replacing(shy)
    replaced, listening = extended_first.handlers[RequestState.RUNNING]
    assert (replaced, type(listening)) == (shy, Listening)
    assert [extended_first.extension_of_handler(each) for each in (replaced, listening)] == ["", "listens"]
    assert extended_first.fingerprint() == CORE.replacing(shy).extended(Listens()).fingerprint()


def test_two_handlers_for_one_state_are_refused_by_name() -> None:
    """One of them would silently lose."""
    with pytest.raises(CoreError, match=rf"{__name__}:Shy and {__name__}:Shier would both replace .* running"):
        CORE.replacing(Shy(), Shier())


def test_a_class_in_place_of_an_instance_is_refused_with_the_instance() -> None:
    """All of its methods looked like misspelt hooks."""
    for compose in (CORE.replacing, CORE.adding):
        with pytest.raises(CoreError, match=r"^handler .*handlers:Running is a class; pass an instance: Running\(\)$"):
            compose(Running)  # type: ignore[arg-type]
    with pytest.raises(CoreError, match=r"^extension .*:Saying is a class; pass an instance: Saying\(\)$"):
        CORE.extended(Saying)  # type: ignore[arg-type]


def test_a_misspelt_hook_is_refused_with_the_one_that_was_meant() -> None:
    """It would never be called, and nobody would notice."""

    class Misspelt(StateHandler):
        state = RequestState.NEW

        def lookup_request(self, turn: Turn, event: e.LookupRequested) -> None:
            """One letter short of a hook."""

    with pytest.raises(CoreError, match=r"Misspelt has a method lookup_request, .*; rename it to lookup_requested"):
        CORE.replacing(Misspelt())


def asks(hook: str, state: RequestState, base: type[StateHandler] = StateHandler) -> StateHandler:
    """A handler with one hook of its own."""
    return type("Asks", (base,), {"state": state, hook: lambda _self, _turn, *_arguments: None})()


ASKED = {
    "lookup_requested": {"new", "preempted", "recovering"},
    "blocks_allocated": {"new", "chunked_prefill", "preempted", "recovering"},
    "request_preempted": {"new", "chunked_prefill", "running", "recovering"},
    "session_continued": {"chunked_prefill", "running"},
    "tokens_rolled_back": {"new", "chunked_prefill", "running", "recovering"},
    "request_finished": {"new", "chunked_prefill", "running", "preempted", "recovering"},
    "tokens_scheduled": {"new", "chunked_prefill", "running", "recovering"},
    "tokens_settled": {"new", "chunked_prefill", "running", "recovering"},
    "extension_observed": set(RequestState),
    "transfer_settled": set(RequestState),
}
"""Hook -> the states whose handlers it can be asked of."""


@pytest.mark.parametrize("state", RequestState)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_refused_in_a_state_in_which_the_table_never_brings_it_about(hook: str, state: RequestState) -> None:
    """A trial: a `request_preempted` of preempted requests was accepted, never called, and its log was sound."""
    handler = asks(hook, state)
    if state in ASKED[hook]:
        CORE.replacing(handler)
        CORE.adding(handler)
        return
    for compose in (CORE.replacing, CORE.adding):
        with pytest.raises(CoreError, match=rf"^handler .*:Asks has a method {hook} for state {state}, .*remove"):
            compose(handler)


class Said(msgspec.Struct):
    """Something was seen."""


class Saying(Extension):
    """Has an observation of its own."""

    name = "saying"
    events: ClassVar[dict[str, type[msgspec.Struct]]] = {"said": Said}


def test_only_hooks_that_are_accepted_are_called() -> None:
    """Of all states, upon everything that the contracts play. In it, what has finished is released at once."""
    called: set[tuple[str, RequestState]] = set()

    def telling(handler: type[StateHandler]) -> StateHandler:
        def told(hook: str) -> Callable[..., None]:
            decides = getattr(handler, hook)

            def method(self: StateHandler, turn: Turn, *arguments: object) -> None:
                called.add((hook, handler.state))
                decides(self, turn, *arguments)

            return method

        hooks = [hook for hook in HOOKS if handler.state in ASKED[hook]]
        return type("Telling", (handler,), {hook: told(hook) for hook in hooks})()

    core = CORE.extended(Saying()).replacing(*(telling(type(handlers[0])) for handlers in CORE.handlers.values()))
    said: Observed = lambda play: [Saying.observed("a", Said(), play.now)]  # noqa: E731 -- as those beside it
    for _ in plays(core, CONFIGURATIONS, observed=(*OBSERVED, said)):
        pass
    never = {(hook, RequestState(state)) for hook, states in ASKED.items() for state in states} - called
    assert never == {("extension_observed", RequestState.FINISHED)}


class Everywhere(StateHandler):
    """Shared by handlers of several states."""

    def request_preempted(self, turn: Turn, event: e.RequestPreempted) -> None:
        """Decide nothing."""


class Late(Everywhere):
    """Inherits its only hook, which never comes in its state."""

    state = RequestState.PREEMPTED


class WhenRunning(Running):
    """Has a hook of running requests."""

    def request_preempted(self, turn: Turn, event: e.RequestPreempted) -> None:
        """Decide nothing."""


class Renamed(WhenRunning):
    """The same for another state, in which it is never called."""

    state = RequestState.PREEMPTED


class LookedUp(Everywhere):
    """Inherits the same hook, beside one that comes."""

    state = RequestState.PREEMPTED

    def lookup_requested(self, turn: Turn, event: e.LookupRequested) -> None:
        """Decide nothing."""


class AlsoLookedUp(LookedUp):
    """Has another that does not come."""

    def session_continued(self, turn: Turn, event: e.SessionContinued) -> None:
        """Decide nothing."""


class Moved(Running):
    """Inherits hooks of the package's that never come in its state."""

    state = RequestState.PREEMPTED


class AsBefore(Preempted):
    """Says of a hook what its base says."""

    request_preempted = StateHandler.request_preempted
    session_continued = Preempted.session_continued


class Assigned(Preempted):
    """Has a hook since it was made."""

    def __init__(self) -> None:
        self.session_continued = lambda _turn, _event: None  # type: ignore[method-assign]


@pytest.mark.parametrize("handler", [Late(), Renamed(), AlsoLookedUp(), Assigned()])
def test_a_hook_that_comes_from_elsewhere_is_refused_too(handler: StateHandler) -> None:
    """From a base class where it has nothing else, or from its instance."""
    with pytest.raises(CoreError, match="would never be called"):
        CORE.replacing(handler)


@pytest.mark.parametrize("handler", [Moved(), AsBefore(), LookedUp()])
def test_what_a_base_class_has_anyway_is_not_refused(handler: StateHandler) -> None:
    """A handler of this package, or one class for handlers of several states."""
    CORE.replacing(handler)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "has no state; write `state = RequestState.RUNNING`, or another one of RequestState.NEW, "),
        (
            "preempted",
            "has state 'preempted', which is of type str, not RequestState; write `state = RequestState.PREE",
        ),
        (
            "PREEMPTED",
            "has state 'PREEMPTED', which is of type str, not RequestState; write `state = RequestState.PREE",
        ),
        ("paused", "has state 'paused', which is of type str, not RequestState; write one of RequestState.NEW, "),
        (
            RequestState,
            "has state <enum 'RequestState'>, which is of type EnumType, not RequestState; write one of Re",
        ),
        (7, "has state 7, which is of type int, not RequestState; write one of RequestState.NEW, "),
    ],
)
def test_a_state_that_is_none_is_refused_with_what_to_write(state: object, message: str) -> None:
    """A trial: `state = "preempted"` was answered with "has no state", also in an extension."""
    handler = type("Asks", (StateHandler,), {"state": state})
    with pytest.raises(CoreError, match=f"^handler .*:Asks {re.escape(message)}"):
        CORE.adding(handler())
    extension = type("Its", (Extension,), {"name": "its", "handlers": (handler,)})()
    with pytest.raises(CoreError, match=f"^extension its: its handler .*Asks {re.escape(message)}"):
        CORE.extended(extension)


class AnswersOnce(Preempted):
    """Keeps a memory, which a handler must not."""

    def __init__(self) -> None:
        self.answered: set[str] = set()
        self.lock = Lock() if isinstance(self, AnswersOnceUnderLock) else None

    def lookup_requested(self, turn: Turn, event: e.LookupRequested) -> None:
        """Answer each id once."""
        if event.request_id not in self.answered:
            super().lookup_requested(turn, event)
        self.answered.add(event.request_id)


class AnswersOnceUnderLock(AnswersOnce):
    """Keeps besides what cannot be copied."""


def preempted_and_looked_up(core: Core) -> Driver:
    """Two lookups after a preemption."""
    driver = Driver(core=core)
    driver.start("a", keys_of("a", 2), 17, (1, 2))
    driver.preempt("a", 16)
    driver.settle_all()
    for _ in range(2):
        driver.observe(e.LookupRequested("a", 0, 17, 10**6))
    return driver


def test_what_a_handler_remembers_ends_with_the_ledger_or_the_replay() -> None:
    """LMCache#2158, made again: one core served all trials of `repro`, and each remembered those before it."""
    core = CORE.replacing(AnswersOnce())
    drivers = [preempted_and_looked_up(core) for _ in range(2)]
    assert drivers[0].observed == drivers[1].observed
    for driver in drivers:
        assert len(driver.all_of(e.LookupAnswered)) == 2, "the new request's, and one of the two lookups"
        for _ in range(2):
            assert list(driver.audited(core=core).divergences) == []


def test_a_handler_that_cannot_be_copied_is_asked_itself() -> None:
    """Then its memory is its author's business; others are copied all the same."""
    core = CORE.replacing(AnswersOnceUnderLock(), Shy())
    of_run = core.handlers_of_run()
    assert of_run[RequestState.PREEMPTED][0] is core.handlers[RequestState.PREEMPTED][0]
    assert of_run[RequestState.RUNNING][0] is not core.handlers[RequestState.RUNNING][0]


def test_handlers_of_one_name_from_two_modules_are_two() -> None:
    """The fingerprint has the module of a class, not only its name."""
    same_name = type("Shy", (Running,), {"__module__": "elsewhere"})()
    assert CORE.replacing(same_name).handler_fingerprint() != CORE.replacing(Shy()).handler_fingerprint()


def test_a_rule_is_checked_or_cannot_be_and_never_both() -> None:
    """The two lists together are what a reader may rely on, and each core has its own."""
    assert all(CORE.not_checked.values())
    rule = next(iter(CORE.rules))
    with pytest.raises(CoreError, match=f"rule {rule} has both a checker and a reason why it cannot be checked"):
        attrs.evolve(CORE, not_checked={rule: "nobody looked"})


def test_an_extension_says_which_of_its_rules_no_log_can_decide() -> None:
    """A reader is told so with the core's own."""

    class Fair(Extension):
        name = "fair"
        not_checked: ClassVar = {"FAIR": "who was served before whom is not recorded"}

    core = CORE.extended(Fair())
    assert core.not_checked == {**CORE.not_checked, **Fair.not_checked}
    assert "FAIR" not in CORE.not_checked

    class Unfair(Extension):
        name = "unfair"
        not_checked: ClassVar = {"FAIR": ""}

    with pytest.raises(CoreError, match="rule FAIR is not checked, with the reason ''; give a reason in words"):
        CORE.extended(Unfair())
    with pytest.raises(CoreError, match="extension other: extension fair has a rule FAIR already"):
        core.extended(type("Other", (Fair,), {"name": "other"})())


def test_a_mended_release_is_other_code_and_so_is_what_nobody_can_read() -> None:
    """By version where kvledger itself differs; what has no source is never the same."""
    header = vocabulary_header(CORE)
    assert CORE.other_code(header) == ""
    assert CORE.other_code(json.loads(json.dumps(header))) == ""
    older = header | {"code": {"kvledger.lifecycle": "0" * 32}, "kvledger_version": "0.0.9"}
    assert CORE.other_code(older).startswith("kvledger 0.0.9 -> ")
    assert CORE.other_code({}).startswith("kvledger unknown -> ")
    rebuilt = header | {"code": {"kvledger.lifecycle": "0" * 32}}
    assert CORE.other_code(rebuilt).startswith("another build of kvledger ")
    elsewhere = type("Shy", (Running,), {"__module__": "elsewhere"})()
    assert CORE.replacing(elsewhere).other_code(vocabulary_header(CORE.replacing(elsewhere))) == "elsewhere"
    shy = CORE.replacing(Shy())
    assert set(shy.code) == {"kvledger.lifecycle", __name__}
    assert shy.other_code(vocabulary_header(shy)) == ""
