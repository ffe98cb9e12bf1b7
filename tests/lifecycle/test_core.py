"""A core is made of parts that fit together; what does not is refused with its name, the reason and the remedy."""

from __future__ import annotations

import attrs
import pytest

from kvledger.lifecycle import Core, CoreError, StateHandler
from kvledger.lifecycle import events as e
from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.core import events_by_id
from kvledger.lifecycle.handlers.running import Running
from kvledger.lifecycle.projections import Projections, ProjectionSpec
from kvledger.lifecycle.states import RequestState
from kvledger.lifecycle.turn import Turn

CORE = Core.standard()
CONFIGURATION = LedgerConfiguration(block_size=16, chunk_size=16, num_slots=1)


class Shy(Running):
    """Replaces the handler of running requests."""


class Shier(Running):
    """Would, too."""


def test_the_standard_core_is_one_object() -> None:
    """It is immutable, so everybody may hold the same."""
    assert Core.standard() is CORE
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        CORE.table = {}  # type: ignore[misc]


def test_replacing_a_handler_makes_another_core() -> None:
    """The one that it was made from stays as it was."""
    shy = Shy()
    core = CORE.replacing(shy)
    assert core.handlers[RequestState.RUNNING] == (shy,)
    assert shy not in CORE.handlers[RequestState.RUNNING]
    assert core.fingerprint() != CORE.fingerprint()
    assert core.replacing(Running()).fingerprint() == CORE.fingerprint()


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


def test_two_events_of_one_id_are_refused() -> None:
    """Ids are for ever; the message says so."""

    class Again(e.Event, frozen=True, tag=len(CORE.events)):
        """Another event."""

    again = e.observation("request.arrived")(Again)
    with pytest.raises(CoreError, match=r"'request\.arrived' is declared twice; ids are for ever"):
        events_by_id((*CORE.events.values(), again))


@pytest.mark.parametrize(("code", "message"), [(0, "have the wire code 0"), (999, "no event has the wire code")])
def test_wire_codes_are_unique_and_without_a_gap(code: int, message: str) -> None:
    """A header names them by the place in its list."""

    class More(e.Event, frozen=True, tag=code):
        """Another event."""

    more = e.observation("test.more")(More)
    with pytest.raises(CoreError, match=message):
        attrs.evolve(CORE, events={**CORE.events, more.id: more})


def test_projections_that_need_one_another_are_refused() -> None:
    """Otherwise making them would never end."""
    specs = (
        ProjectionSpec("tracker", lambda its: its.blocks),  # type: ignore[arg-type, return-value]
        ProjectionSpec("blocks", lambda its: its.tracker),  # type: ignore[arg-type, return-value]
    )
    with pytest.raises(AttributeError, match="it needs itself: tracker -> blocks -> tracker"):
        Projections(attrs.evolve(CORE, projections=specs), CONFIGURATION)
