"""Upcasters: functions that convert the fields of an event's old version, so that old logs stay readable.

When an event changes, give its class the new fields and the next version, and add an upcaster to `standard.py` that
converts the old fields. An event of version 1 goes through every upcaster up to today's version. This module knows the
names of fields and nothing about bytes. It contains no upcasters, because these are a part of the core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvledger.lifecycle.events import Event

Fields = Mapping[str, Any]
"""Field name → value, of one event."""
Upcaster = Callable[[Fields], Fields]
Upcasters = Mapping[tuple[str, int], Upcaster]
"""(event id, version) → function that converts the fields of that version to the next version."""


class UpcasterError(ValueError):
    """The upcasters do not lead from every old version to today's. This is a bug in the code: no core can be made."""


def check_upcasters(upcasters: Upcasters, events: Mapping[str, type[Event]]) -> None:
    """Check that upcasters lead from version 1 of every event, one version at a time, to its version in `events`.

    Raises:
        UpcasterError: an upcaster is missing, leads past today's version, or is for an event that does not exist.
    """
    for event_id, from_version in upcasters:
        if event_id not in events:
            message = f"{event_id}: there is an upcaster from version {from_version}, but no such event; correct the id"
            raise UpcasterError(message)
        version = events[event_id].version
        if not 1 <= from_version < version:
            message = (
                f"{event_id}: there is an upcaster from version {from_version}, but the event is in version {version}; "
                "raise the version where the event is declared, or remove the upcaster"
            )
            raise UpcasterError(message)
    for event_id, event_class in events.items():
        for known in range(1, event_class.version):
            if (event_id, known) not in upcasters:
                message = (
                    f"{event_id}: the event is in version {event_class.version}, but no upcaster leads from version "
                    f"{known} to {known + 1}, so logs with that version could not be read; add one to the core"
                )
                raise UpcasterError(message)


def upcast(upcasters: Upcasters, event_id: str, fields: Fields, *, from_version: int, to_version: int) -> Fields:
    """Return the fields of `to_version`, converted step by step."""
    for version in range(from_version, to_version):
        fields = upcasters[event_id, version](fields)
    return fields
