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
    """For every field of every class of events some wrong logs, spread over the log.

    A value becomes another in itself, or that which the field has in other events.
    """
    keys = [key for _, event in events if isinstance(event, e.ChunkKeysObserved) for key in event.keys]
    places: dict[type[e.Event], list[int]] = {}
    for place, (_, event) in enumerate(events):
        places.setdefault(type(event), []).append(place)
    for event_class, all_places in places.items():
        step = max(1, len(all_places) // max_occurrences)
        for field in e.field_names(event_class):
            values = list(dict.fromkeys(getattr(events[place][1], field) for place in all_places))[-4:]
            if event_class in {e.ChunksEvicted, e.ChunksTainted} and field == "keys":
                values = [(key,) for key in keys]
            for place in all_places[::step][:max_occurrences]:
                sequence, event = events[place]
                right = getattr(event, field)
                others = [("as elsewhere", value) for value in values if value != right]
                for how, value in [*_wrong(right, field), *others]:
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
        others = {"request_id": ["a", "b", "nobody"], "reason": ["pool_full"]}.get(field, [f"not {value}"])
        yield from (("another", other) for other in others if other != value)
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
