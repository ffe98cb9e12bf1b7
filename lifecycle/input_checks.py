"""Checks an observation before it is recorded, for a program that drives a `Ledger` itself.

Without these checks, a field of a wrong type makes the log unreadable from that frame on. Two requests with the same
ordinal become one request for every reader. kvledger's own adapters skip these checks.
"""

from __future__ import annotations

import reprlib
from functools import cache

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.core import Core
from kvledger.lifecycle.projections.tracker import RequestTracker
from kvledger.lifecycle.states import BlocksRegion

_fields = cache(msgspec.structs.fields)


def check_observation(event: e.Event, core: Core, tracker: RequestTracker) -> None:
    """Refuse an event that is certainly wrong, whatever events follow.

    Raises:
        ValueError: the message names the event, the field, its value, and what to pass instead.
    """
    name = type(event).__name__
    if type(event) not in core.observations:
        shown = name if isinstance(event, e.Event) else reprlib.repr(event)
        message = f"{shown} is no observation; pass an event of kvledger.lifecycle.events that is not a decision"
        raise ValueError(message)
    wrong = _wrong_field(event) or _wrong_value(event, tracker)
    if wrong is not None:
        field, reason = wrong
        message = f"{name}.{field} is {reprlib.repr(getattr(event, field))}: {reason}"
        raise ValueError(message)


def _wrong_field(event: e.Event) -> tuple[str, str] | None:
    """Return a field that no reader of the log could decode, and the reason."""
    if _unreadable(event, type(event)) is None:
        return None
    found = ((field.name, _unreadable(getattr(event, field.name), field.type)) for field in _fields(type(event)))
    return next(((field, f"{reason}; pass a value of this type") for field, reason in found if reason), None)


def _unreadable(value: object, kind: object) -> str | None:
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)
    except Exception as error:  # noqa: BLE001 -- the encoder may call a foreign object
        return str(error)
    return None


def _wrong_value(event: e.Event, tracker: RequestTracker) -> tuple[str, str] | None:
    for field in _fields(type(event)):
        value = getattr(event, field.name)
        if field.name.startswith("num_") and isinstance(value, int) and value < 0 and value != field.default:
            return field.name, "it is negative; pass 0 or more"
    if isinstance(event, e.RequestArrived) and event.ordinal != tracker.num_arrived:
        return "ordinal", f"the next ordinal is {tracker.num_arrived}; pass ledger.next_ordinal"
    if isinstance(event, e.RequestPreempted | e.RequestFinished):
        record = tracker.get(event.request_id)
        if record is not None and record.blocks is not BlocksRegion.NONE:
            num_computed_tokens, claimed = tracker.num_computed_tokens(record), record.claimed
            num_admitted_tokens = claimed.num_computed_tokens + claimed.num_external_tokens if claimed else 0
            most = max(num_computed_tokens, num_admitted_tokens)
            if event.num_settled_tokens > most:
                return (
                    "num_settled_tokens",
                    f"only {most} tokens were computed or loaded; pass how many of these are in the blocks",
                )
    return None
