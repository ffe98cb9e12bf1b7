"""Sub-states of extensions, kept in `record.sub`. A sub-state changes before the phase to which it belongs."""

from __future__ import annotations

from collections.abc import Callable

from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import triggers_of
from kvledger.lifecycle.machine import Tables
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections.base import Projection, Subject
from kvledger.lifecycle.projections.extensions import Extensions
from kvledger.lifecycle.projections.tracker import RequestTracker


class SubStates(Projection):
    """Moves the sub-states in the records of requests. Folds nothing if no extension has sub-states."""

    def __init__(self, tables: Tables, tracker: RequestTracker, extensions: Extensions) -> None:
        self._tracker = tracker
        self._phase = tables.phase
        self._request_events = tables.request_events
        self._moves = tables.sub_states
        self._extensions = extensions
        self._owner = {
            dest: extension.name for extension in tables.extensions for _, _, dest in extension.rows if "." in dest
        }

    def folds(self) -> dict[type[e.Event], Callable[..., None]]:
        """Event class → fold: marked methods, and `_walk` for each class that may move a phase or a sub-state."""
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
        trigger = subject.trigger
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
