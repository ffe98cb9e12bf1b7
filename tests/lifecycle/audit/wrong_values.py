"""Wrong logs made from right ones: one field of one event is another, everything else stays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.replay import SequencedEvent


class Wrong(NamedTuple):
    """One wrong log."""

    event_id: str
    field: str
    how: str
    """What was done to the value."""
    sequence: int
    events: list[SequencedEvent]


def wrong_logs(events: list[SequencedEvent], max_occurrences: int) -> Iterator[Wrong]:
    """For every field of every class of events some wrong logs, spread over the log."""
    places: dict[type[e.Event], list[int]] = {}
    for place, (_, event) in enumerate(events):
        places.setdefault(type(event), []).append(place)
    for event_class, all_places in places.items():
        step = max(1, len(all_places) // max_occurrences)
        for field in e.field_names(event_class):
            for place in all_places[::step][:max_occurrences]:
                sequence, event = events[place]
                for how, value in _wrong(getattr(event, field), field):
                    altered = list(events)
                    altered[place] = sequence, msgspec.structs.replace(event, **{field: value})
                    yield Wrong(event_class.id, field, how, sequence, altered)


def _wrong(value: object, field: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, bool):
        yield "the other", not value
    elif isinstance(value, int):
        yield "one more", value + 1
        if value:
            yield "one less", value - 1
            yield "none", 0
        yield "many more", value + 16
    elif isinstance(value, str):
        yield "another", {"a": "b"}.get(value, "a") if field == "request_id" else f"not {value}"
    elif isinstance(value, bytes):
        yield "another", bytes(len(value))
    elif isinstance(value, tuple):
        yield from _wrong_tuple(value)


def _wrong_tuple(value: tuple[object, ...]) -> Iterator[tuple[str, object]]:
    if value:
        yield "without the last", value[:-1]
        yield "the first twice", (value[0], *value)
        for how, first in _wrong_entry(value[0]):
            yield f"the first {how}", (first, *value[1:])
    if len(value) > 1 and value[0] != value[1]:
        yield "exchanged", (value[1], value[0], *value[2:])


def _wrong_entry(entry: object) -> Iterator[tuple[str, object]]:
    if not isinstance(entry, tuple):
        yield from _wrong(entry, "")
        return
    for place, number in enumerate(entry):
        for how, other in _wrong(number, ""):
            yield f"with its number {place} {how}", (*entry[:place], other, *entry[place + 1 :])
