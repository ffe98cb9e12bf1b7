"""A core is made of parts that fit together; what does not is refused with its name, the reason and the remedy."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import ClassVar

import attrs
import pytest

from kvledger.lifecycle import Core, CoreError, Extension, StateHandler
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import vocabulary_header
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.handlers.running import Running
from kvledger.lifecycle.projections import Projections, ProjectionSpec
from kvledger.lifecycle.states import RequestState
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


def test_a_misspelt_hook_is_refused_with_the_one_that_was_meant() -> None:
    """It would never be called, and nobody would notice."""

    class Misspelt(StateHandler):
        state = RequestState.NEW

        def lookup_request(self, turn: Turn, event: e.LookupRequested) -> None:
            """One letter short of a hook."""

    with pytest.raises(CoreError, match=r"Misspelt has a method lookup_request, .*; lookup_requested was meant"):
        CORE.replacing(Misspelt())


def test_handlers_of_one_name_from_two_modules_are_two() -> None:
    """The fingerprint has the module of a class, not only its name."""
    same_name = type("Shy", (Running,), {"__module__": "elsewhere"})()
    assert CORE.replacing(same_name).handler_fingerprint() != CORE.replacing(Shy()).handler_fingerprint()


def test_a_rule_is_checked_or_cannot_be_and_never_both() -> None:
    """The two lists together are what a reader may rely on, and each core has its own."""
    assert all(CORE.not_checked.values())
    rule = next(iter(CORE.rules))
    with pytest.raises(CoreError, match=f"rule {rule} has a checker, and a reason why it cannot be checked"):
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

    with pytest.raises(CoreError, match="rule FAIR is not checked for ''; say why in words"):
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
    elsewhere = type("Shy", (Running,), {"__module__": "elsewhere"})()
    assert CORE.replacing(elsewhere).other_code(vocabulary_header(CORE.replacing(elsewhere))) == "elsewhere"
    shy = CORE.replacing(Shy())
    assert set(shy.code) == {"kvledger.lifecycle", __name__}
    assert shy.other_code(vocabulary_header(shy)) == ""


def test_projections_that_need_one_another_are_refused() -> None:
    """Otherwise making them would never end."""
    specs = (
        ProjectionSpec("tracker", lambda its: its.blocks),  # type: ignore[arg-type, return-value]
        ProjectionSpec("blocks", lambda its: its.tracker),  # type: ignore[arg-type, return-value]
    )
    with pytest.raises(AttributeError, match="it needs itself: tracker -> blocks -> tracker"):
        Projections(attrs.evolve(CORE, projections=specs), CONFIGURATION)
