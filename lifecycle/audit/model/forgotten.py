"""What is kept by request id goes when the request's life ends, or turns: for all checkers that do no more than that.

Most of what a checker does at such events is to drop an entry. Dropped here, it costs one look at a dict each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.model.moment import Check, Moment

LIFE: tuple[type[e.RequestEvent], ...] = (e.RequestArrived, e.RequestReleased)
"""Where a life begins and where it ends."""
_TURNS: tuple[type[e.RequestEvent], ...] = (*LIFE, e.RequestPreempted, e.RequestFinished, e.SessionContinued)


class Forgotten:
    """Event class -> dicts by request id that lose the request's entry there, before any check looks."""

    def __init__(self) -> None:
        self._pops: dict[type[e.Event], list[Callable[[str, None], object]]] = {
            event_class: [] for event_class in _TURNS
        }

    def at(self, event_classes: Iterable[type[e.Event]], *entries: dict[str, Any]) -> None:
        """Forget these entries at events of these classes. The dicts must be changed, never replaced."""
        for event_class in event_classes:
            self._pops[event_class].extend([of_requests.pop for of_requests in entries])

    def folds(self) -> Iterable[tuple[type[e.Event], Check]]:
        """(event class, fold), to be done as checks are; they never find anything."""
        return [
            (event_class, _of_an_earlier_life(pops) if event_class is e.RequestArrived else _forgetting(pops))
            for event_class, pops in self._pops.items()
        ]


def _forgetting(pops: list[Callable[[str, None], object]]) -> Check:
    """The list is filled later, when the checkers are asked for their checks."""

    def forget(event: e.RequestEvent, _moment: Moment) -> None:
        request_id = event.request_id
        for pop in pops:
            pop(request_id, None)

    return forget


def _of_an_earlier_life(pops: list[Callable[[str, None], object]]) -> Check:
    """Where an id is new there is nothing to forget; what a released request had is forgotten already."""
    forget = _forgetting(pops)

    def forget_earlier(event: e.RequestArrived, moment: Moment) -> None:
        if moment.state_before is not None:
            forget(event, moment)

    return forget_earlier
