"""What is kept by request id goes when the request's life ends, or turns: for all checkers that do no more than that.

Most of what a checker does at such events is to drop an entry. Dropped here, it costs one look at a dict each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.model.moment import Moment
from kvledger.lifecycle.marks import on

LIFE: tuple[type[e.RequestEvent], ...] = (e.RequestArrived, e.RequestReleased)
"""Where a life begins and where it ends."""
_TURNS: tuple[type[e.RequestEvent], ...] = (*LIFE, e.RequestPreempted, e.RequestFinished, e.SessionContinued)


class Forgotten:
    """Event class -> dicts by request id that lose the request's entry there, before any check looks."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self._pops: dict[type[e.Event], list[Callable[[str, None], object]]] = {
            event_class: [] for event_class in _TURNS
        }

    def at(self, event_classes: Iterable[type[e.Event]], *entries: dict[str, Any]) -> None:
        """Forget these entries at events of these classes. The dicts must be changed, never replaced."""
        for event_class in event_classes:
            self._pops[event_class].extend([of_requests.pop for of_requests in entries])

    @on(*_TURNS)
    def _forget(self, event: e.RequestEvent) -> None:
        if self._moment.state_before is None:
            return  # a new id: there is nothing to forget; what a released request had is forgotten already
        request_id = event.request_id
        for pop in self._pops[type(event)]:
            pop(request_id, None)
