"""Sub-states of extensions: `record.sub`, which moves before the phase that it refines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import trigger_of, triggers_of
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections.base import Projection
from kvledger.lifecycle.subject import Subject

if TYPE_CHECKING:
    from kvledger.lifecycle.core import Core
    from kvledger.lifecycle.projections.extensions import Extensions
    from kvledger.lifecycle.projections.tracker import RequestTracker


class SubStates(Projection):
    """Folds nothing unless an extension has rows. The record of the request keeps the sub-state."""

    def __init__(self, core: Core, tracker: RequestTracker, extensions: Extensions) -> None:
        self._tracker = tracker
        self._phase = core.compiled.phase
        self._request_events = core.request_events
        self._moves = core.sub_moves
        self._extensions = extensions
        self._owner = {
            dest: extension.name for extension in core.extensions for _, _, dest in extension.rows if "." in dest
        }

    def folds(self) -> dict[type[e.Event], Callable[..., None]]:
        """What is marked, and what may move a sub-state, or the phase under it."""
        if not self._owner:
            return {}
        moving = (each for each in self._request_events if not self._phase.keys().isdisjoint(triggers_of(each)))
        return {**dict.fromkeys(moving, self._walk), **super().folds()}

    @on(e.ExtensionStopped)
    def _stopped(self, event: e.ExtensionStopped, _sequence: int, _subject: Subject) -> None:
        for record in self._tracker:
            if self._owner.get(record.path) == event.extension:
                record.sub = ""

    def _walk(self, event: e.RequestEvent, _sequence: int, subject: Subject) -> None:
        record = subject.current
        trigger = trigger_of(event)
        dest = None if record is None else self._phase.get(trigger, {}).get(record.state)
        if record is None or dest is None:
            return
        if isinstance(event, e.ExtensionObserved | e.ExtensionDecided):
            trigger = f"{event.extension}/{event.name}"
        sub = self._moves.get((trigger, record.state, record.sub))
        if sub is None:
            sub = self._moves.get((trigger, record.state, ""))
        if sub and self._owner[f"{dest}.{sub}"] in self._extensions.state.stopped:
            sub = None
        if sub is not None:
            record.sub = sub
        elif dest is not record.state:
            record.sub = ""
