"""A ledger that fails on purpose: in what it observes, or in what it folds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvledger.lifecycle import events as e
from sim.broken_copies import BROKEN


def raise_once(original: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    """A function that raises the first time that `when` says so."""
    raised: list[bool] = []

    def call(*arguments: Any, **options: Any) -> Any:
        if not raised and when(*arguments, **options):
            raised.append(True)
            raise RuntimeError(BROKEN)
        return original(*arguments, **options)

    return call


def fail_to_observe_once(engine: Any, when: Callable[[e.Event], bool]) -> None:
    """The first observation of which `when` says so cannot be made."""
    ledger = engine.connector.scheduler_side.ledger
    ledger.observe = raise_once(ledger.observe, when)


def fail_in_a_fold(engine: Any, event_class: type[e.Event], when: Callable[[], bool] = lambda: True) -> None:
    """From now on folds of such events fail when `when` says so, behind all projections."""
    routes = engine.projections._routes

    def raising(_event: e.Event, _sequence: int, _subject: object) -> None:
        if when():
            raise RuntimeError(BROKEN)

    route = routes[event_class]
    routes[event_class] = route._replace(folds=route.folds._replace(others=(*route.folds.others, raising)))
