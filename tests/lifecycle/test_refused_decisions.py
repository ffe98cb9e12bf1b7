"""What a handler makes of a refused decision does not matter: it is not recorded, and its turn is over."""

# ruff: noqa: ARG001 -- each mistake is given the same

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit
from kvledger.lifecycle.handler_contract import DecisionRefused
from kvledger.lifecycle.handlers import Running
from kvledger.lifecycle.turn import Turn

REFUSED: Any = e.CacheReset(1)


def caught_and_gone_on(turn: Turn, settle: Callable[[], None]) -> None:
    """As if nothing had happened."""
    with contextlib.suppress(DecisionRefused):
        turn.decide(REFUSED)
    settle()


def caught_at_the_end(turn: Turn, settle: Callable[[], None]) -> None:
    """The last decision is refused, so nothing raises any more."""
    settle()
    with contextlib.suppress(DecisionRefused):
        turn.decide(REFUSED)


def raised_as_another(turn: Turn, settle: Callable[[], None]) -> None:
    """The handler has an error of its own for it."""
    try:
        turn.decide(REFUSED)
    except DecisionRefused:
        message = "no luck"
        raise KeyError(message) from None


def not_caught(turn: Turn, settle: Callable[[], None]) -> None:
    """As most handlers do."""
    turn.decide(REFUSED)
    settle()


def returned(turn: Turn, settle: Callable[[], None]) -> object:
    """Written as if somebody would ask for the decisions."""
    return iter((REFUSED,))


def core_with(mistake: Callable[..., object]) -> Core:
    """A running request makes this mistake when it settles tokens, if its id is "bad"."""

    class Mistaken(Running):
        def tokens_settled(self, turn: Turn, first_chunk: int, num_settled_tokens: int) -> None:
            standard = super().tokens_settled
            if turn.record.request_id == "bad":
                return mistake(turn, lambda: standard(turn, first_chunk, num_settled_tokens))  # type: ignore[return-value]
            return standard(turn, first_chunk, num_settled_tokens)

    return Core.standard().replacing(Mistaken())


@pytest.mark.parametrize(
    ("mistake", "saves"),
    [
        (not_caught, []),
        (caught_and_gone_on, []),
        (caught_at_the_end, ["save.issued"]),
        (raised_as_another, []),
        (returned, []),
    ],
)
def test_a_refused_decision_ends_the_turn_and_costs_its_request_the_cache(
    mistake: Callable[..., object], saves: list[str]
) -> None:
    """Others of the same step are served; deciding again comes to the same."""
    driver = Driver(chunk_size=16, core=core_with(mistake))
    driver.start("bad", keys_of("b", 1), 17, (1, 2))
    driver.start("good", keys_of("g", 1), 17, (3, 4))
    decisions = driver.step(settled=[("bad", 0, 16), ("good", 0, 16)])
    assert [decision.id for decision in decisions] == [
        *saves,
        "invariant.violated",
        "request.quarantined",
        "save.issued",
    ]
    (violation,) = driver.all_of(e.InvariantViolated)
    assert (violation.rule, violation.request_id) == ("HANDLER_CONTRACT", "bad")
    assert "no decision that a handler may make" in violation.detail or "was returned" in violation.detail
    driver.ledger.commit()
    audit = Audit(core_with(mistake), driver.configuration)
    audit.run(driver.sink.events())
    assert not audit.divergences
    assert audit.unfoldable is None


def test_nothing_can_be_decided_in_a_turn_that_was_kept() -> None:
    """Its handler had its chance; what it decides later is refused, wherever it does so."""
    kept: list[Turn] = []
    core = core_with(lambda turn, _settle: kept.append(turn))
    driver = Driver(chunk_size=16, core=core)
    driver.start("bad", keys_of("b", 1), 17, (1, 2))
    assert driver.step(settled=[("bad", 0, 16)]) == []
    (turn,) = kept
    with pytest.raises(DecisionRefused, match="the turn is over"):
        turn.decide(e.RequestQuarantined(*turn.record.life, "late", turn.cause))
    assert driver.record("bad").trust == "trusted"
