"""From the fields of an event's old version to those of the next: how a log outlives the code that wrote it.

When an event changes, its class gets the new fields and the next version, and an upcaster here says how the old fields
become the new ones. A log of version 1 is read through every step up to today's. This room knows fields by name and
nothing about bytes.

    @UPCASTERS.upcaster("request.arrived", from_version=1)
    def _requests_have_a_priority(fields: Fields) -> Fields:
        return {**fields, "priority": 0}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvledger.lifecycle.events import Event

Fields = Mapping[str, Any]
"""Field name -> value, of one event."""
Upcaster = Callable[[Fields], Fields]


class UpcasterError(ValueError):
    """Upcasters that do not lead from every old version to today's: a mistake in the code that no core is made with."""


class Upcasters:
    """Event id -> version -> how its fields become those of the next version."""

    def __init__(self) -> None:
        self._steps: dict[str, dict[int, Upcaster]] = {}

    def upcaster(self, event_id: str, *, from_version: int) -> Callable[[Upcaster], Upcaster]:
        """Register a function from the fields of `from_version` to those of `from_version + 1`.

        Raises:
            UpcasterError: there is one already.
        """

        def register(step: Upcaster) -> Upcaster:
            steps = self._steps.setdefault(event_id, {})
            if from_version in steps:
                message = (
                    f"{event_id}: two upcasters lead from version {from_version} to {from_version + 1}; "
                    "one of them would silently lose, remove it"
                )
                raise UpcasterError(message)
            steps[from_version] = step
            return step

        return register

    def check(self, vocabulary: Mapping[str, type[Event]]) -> None:
        """See that from version 1 of every event a chain without a gap leads to its version in `vocabulary`.

        Raises:
            UpcasterError: a step is missing, leads past today's version, or is for an event that does not exist.
        """
        for event_id, steps in self._steps.items():
            if event_id not in vocabulary:
                message = f"{event_id}: upcasters from versions {sorted(steps)}, but no such event; is the id misspelt?"
                raise UpcasterError(message)
            version = vocabulary[event_id].version
            beyond = [known for known in sorted(steps) if not 1 <= known < version]
            if beyond:
                message = (
                    f"{event_id}: an upcaster from version {beyond[0]}, but the event is in version {version}; "
                    "raise the version where the event is declared, or remove the upcaster"
                )
                raise UpcasterError(message)
        for event_id, event_class in vocabulary.items():
            steps = self._steps.get(event_id, {})
            missing = [known for known in range(1, event_class.version) if known not in steps]
            if missing:
                message = (
                    f"{event_id}: is in version {event_class.version}, but no upcaster leads from version {missing[0]} "
                    f"to {missing[0] + 1}, so logs with it could not be read; write one in upcasters.py"
                )
                raise UpcasterError(message)

    def upcast(self, event_id: str, fields: Fields, *, from_version: int, to_version: int) -> Fields:
        """The fields of `to_version`, made step by step."""
        steps = self._steps.get(event_id, {})
        for version in range(from_version, to_version):
            fields = steps[version](fields)
        return fields


UPCASTERS = Upcasters()

# Every event is in its first version: there is nothing to register yet.
