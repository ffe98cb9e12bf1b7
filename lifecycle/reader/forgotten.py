"""Removes entries about a request at chosen events, for example when a life is over. Checkers need not do it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvledger.lifecycle import events as e
from kvledger.lifecycle.marks import on

LIFE: tuple[type[e.RequestEvent], ...] = (e.RequestArrived, e.RequestReleased)
"""Events at which a life begins or ends."""
_TURNS: tuple[type[e.RequestEvent], ...] = (*LIFE, e.RequestPreempted, e.RequestFinished, e.SessionContinued)


class Forgotten:
    """Dicts by request id. At events of chosen classes, a dict loses the entry of the request before any check runs."""

    def __init__(self) -> None:
        self._entries: dict[type[e.Event], list[dict[str, Any]]] = {event_class: [] for event_class in _TURNS}

    def at(self, event_classes: Iterable[type[e.Event]], *entries: dict[str, Any]) -> None:
        """Remove the request from these dicts at events of these classes. The caller must not replace the dicts."""
        for event_class in event_classes:
            self._entries[event_class] += entries

    @on(*_TURNS)
    def _forget(self, event: e.RequestEvent) -> None:
        for entries in self._entries[type(event)]:
            entries.pop(event.request_id, None)
