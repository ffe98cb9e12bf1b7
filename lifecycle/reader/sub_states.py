"""The sub-states of extensions, which refine the state of a life."""

from __future__ import annotations

from collections.abc import Iterable

from kvledger.lifecycle import events as e
from kvledger.lifecycle.machine import Tables
from kvledger.lifecycle.reader.records import Life


class SubStates:
    """Updates `Life.sub_state`. Call `move` before the phase of the life changes."""

    def __init__(self, tables: Tables) -> None:
        self._moves = tables.sub_states
        self._dests = tables.phase
        self._owner = {
            dest: extension.name for extension in tables.extensions for _, _, dest in extension.rows if "." in dest
        }
        self.stopped: dict[str, int] = {}
        """Extension that was stopped → sequence number of that event."""

    def move(self, event: e.RequestEvent, trigger: str, life: Life) -> None:
        """Let the life enter the sub-state to which the event leads, or leave its sub-state if its phase changes."""
        if not self._owner:
            return
        dest = self._dests.get(trigger, {}).get(life.state)
        if dest is None:
            return
        if isinstance(event, e.ExtensionObserved | e.ExtensionDecided):
            trigger = f"{event.extension}/{event.name}"
        entered = self._moves.get((trigger, life.state, life.sub_state))
        if entered is None:
            entered = self._moves.get((trigger, life.state, ""))
        if entered and self._owner[f"{dest}.{entered}"] in self.stopped:
            entered = None
        if entered is not None:
            life.sub_state = entered
        elif dest is not life.state:
            life.sub_state = ""

    def stop(self, extension: str, sequence: int, lives: Iterable[Life]) -> None:
        """Stop the extension, and let these lives leave its sub-states."""
        self.stopped.setdefault(extension, sequence)
        for life in lives:
            if self._owner.get(life.path) == extension:
                life.sub_state = ""
