"""Events to bytes and back.

A frame's payload is one msgpack array of events; an event is an array of its wire code and its fields in the
order of declaration. The wire codes are listed in the log's header, so a log names what is in it; the field
order of a released version is frozen by golden files in the tests. `msgspec` checks the types on the way in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, get_type_hints

import msgspec

from kvledger.lifecycle.events import VOCABULARY, Event

SCHEMA_VERSION = 1
"""Grows when a reader of the version before could misunderstand a log."""


class CodecError(ValueError):
    """Bytes or a vocabulary that this version cannot turn into events."""


class SchemaTooNew(CodecError):
    """The log was written by a newer kvledger; the message names the version it needs."""


def field_names(event_class: type[Event]) -> tuple[str, ...]:
    """The fields of an event in wire order."""
    return event_class.__match_args__


def vocabulary_header() -> dict[str, object]:
    """What a writer puts into the log's header so that a reader can decode it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "vocabulary": [
            {"id": event.id, "version": event.version, "fields": list(field_names(event))}
            for event in VOCABULARY.values()
        ],
    }


def _field_getter(event_class: type[Event]) -> Callable[[Event], tuple[Any, ...]]:
    names = field_names(event_class)
    getter = attrgetter(*names)
    if len(names) == 1:
        return lambda event: (getter(event),)
    return getter


class EventEncoder:
    """Encodes the events of one commit into one payload."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._codes = {event_class: code for code, event_class in enumerate(VOCABULARY.values())}
        self._getters = {event_class: _field_getter(event_class) for event_class in VOCABULARY.values()}

    def encode(self, events: Sequence[Event]) -> bytes:
        """One payload for all events, in order."""
        codes, getters = self._codes, self._getters
        return self._encoder.encode([(codes[type(event)], *getters[type(event)](event)) for event in events])


class _Declared(msgspec.Struct):
    """One entry of a header's vocabulary."""

    id: str
    version: int
    fields: list[str]


class EventDecoder:
    """Decodes payloads of a log with the given header.

    Raises:
        SchemaTooNew: the header names a schema or an event version that this kvledger does not know.
        CodecError: the header has no vocabulary that can be read.
    """

    def __init__(self, header: Mapping[str, Any]) -> None:
        try:
            schema_version = msgspec.convert(header.get("schema_version"), int)
            writer = f"it was written by kvledger {header.get('kvledger_version', 'unknown')}: use that or a later one"
            if schema_version > SCHEMA_VERSION:
                message = f"the log has schema version {schema_version}, this kvledger reads {SCHEMA_VERSION}; {writer}"
                raise SchemaTooNew(message)
            vocabulary = msgspec.convert(header.get("vocabulary"), list[_Declared])
        except msgspec.ValidationError as error:
            message = f"the log's header names no vocabulary ({error}); it was not written by kvledger's connector"
            raise CodecError(message) from error
        self._decoder = msgspec.msgpack.Decoder(list[list[Any]])
        self._classes: dict[Any, tuple[type[Event], Any]] = {}
        for code, declared in enumerate(vocabulary):
            event_class = VOCABULARY.get(declared.id)
            if event_class is None or declared.version > event_class.version:
                known = "no version" if event_class is None else f"version {event_class.version}"
                message = (
                    f"the log uses {declared.id} version {declared.version}, this kvledger knows {known}; {writer}"
                )
                raise SchemaTooNew(message)
            hints = get_type_hints(event_class)
            types = tuple(hints[name] for name in field_names(event_class))
            self._classes[code] = (event_class, tuple[types])  # type: ignore[valid-type]

    def decode(self, payload: bytes) -> list[Event]:
        """The events of one payload.

        Raises:
            CodecError: the payload is not what the header promised.
        """
        try:
            events = []
            for code, *fields in self._decoder.decode(payload):
                event_class, types = self._classes[code]
                events.append(event_class(*msgspec.convert(fields, types)))
        except (msgspec.MsgspecError, LookupError, TypeError, ValueError, RecursionError) as error:
            message = f"a payload of {len(payload)} bytes is not what the log's header promises: {error!r}"
            raise CodecError(message) from error
        return events
