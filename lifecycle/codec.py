"""Events to bytes and back.

The payload of a frame is one msgpack array of events. An event is an array of its wire code and its fields in order.
The log's header lists the wire codes, so a log describes its own contents. Golden files in the tests fix the field
order of released versions. `msgspec` checks types when it decodes.

Events that the header declares as today's code does are decoded directly. An event of an older version, or with another
wire code, is decoded into a wire class and then converted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Union, cast, get_type_hints

import attrs
import msgspec

from kvledger.lifecycle.configuration import LedgerConfiguration
from kvledger.lifecycle.core import Core
from kvledger.lifecycle.events import Event, LoadIssued, SaveIssued, TailSaveIssued, field_names, wire_code
from kvledger.lifecycle.ranges import MAX_SLOTS
from kvledger.lifecycle.untrusted import Undecodable, converted, msgpack_decoder
from kvledger.lifecycle.upcasters import upcast
from kvledger.lifecycle.version import __version__

__all__ = [
    "SCHEMA_VERSION",
    "CodecError",
    "DecodedFrame",
    "EventDecoder",
    "SchemaTooNew",
    "field_names",
    "log_header",
    "vocabulary_header",
]

SCHEMA_VERSION = 3
"""Raise it when a log and a reader of different versions could misunderstand each other. Readers refuse other
schemas."""


class CodecError(ValueError):
    """Bytes or a vocabulary that this version cannot turn into events."""


class SchemaTooNew(CodecError):
    """A newer kvledger wrote the log; the message names the version that it needs."""


def vocabulary_header(core: Core) -> dict[str, object]:
    """Return what a log's header needs for a reader to decode the log and to know which code decided."""
    return {
        "schema_version": SCHEMA_VERSION,
        "vocabulary": [
            {"id": event.id, "version": event.version, "fields": list(field_names(event))}
            for event in sorted(core.events.values(), key=wire_code)
        ],
        "extensions": [attrs.asdict(extension.declaration()) for extension in core.extensions],
        "table_fingerprint": core.table_fingerprint(),
        "handler_fingerprint": core.handler_fingerprint(),
        "kvledger_version": __version__,
        "code": dict(core.code),
    }


def log_header(core: Core, configuration: LedgerConfiguration) -> dict[str, object]:
    """Return the smallest header of a log that `kvledger` can read. Create the store with it. All values are JSON."""
    return {**vocabulary_header(core), "configuration": attrs.asdict(configuration)}


encode_events: Callable[[Sequence[Event]], bytes] = msgspec.msgpack.Encoder().encode
"""Encodes the events of one commit into one payload, in order."""


@attrs.frozen
class DecodedFrame:
    """The known events of one payload, and the positions of skipped ones."""

    events: list[Event]
    skipped: tuple[int, ...] = ()
    """Positions in the payload, from 0, ascending. Only a lenient decoder skips events."""

    @property
    def num_events(self) -> int:
        """Events in the payload, including skipped ones."""
        return len(self.events) + len(self.skipped)

    def numbered(self, first_sequence: int) -> Iterator[tuple[int, Event]]:
        """Yield each known event with its sequence number; skipped events leave gaps in the numbers."""
        if not self.skipped:
            return enumerate(self.events, first_sequence)
        skipped = set(self.skipped)
        places = (place for place in range(self.num_events) if place not in skipped)
        return ((first_sequence + place, event) for place, event in zip(places, self.events, strict=True))


class _Declared(msgspec.Struct):
    """One entry of a header's vocabulary."""

    id: str
    version: int
    fields: list[str]


_WITH_SLOTS = frozenset({LoadIssued, SaveIssued, TailSaveIssued})

_Convert = Callable[[Any], Event | None]
"""Converts an instance of a wire class to an event; returns None to skip it."""


class EventDecoder:
    """Decodes payloads of a log with the given header.

    With `lenient`, events and event versions that this kvledger does not know are skipped and counted instead of
    refused. A fold may then lack what they would have changed, which the caller must judge.

    Raises:
        SchemaTooNew: the header names a schema, or (unless `lenient`) an event or a version of one, that this
            kvledger does not know.
        CodecError: the log has an earlier schema, or its header has no readable vocabulary, or it declares other
            fields for an event than the event has.
    """

    def __init__(self, core: Core, header: Mapping[str, Any], *, lenient: bool = False) -> None:
        self.num_skipped: Counter[str] = Counter()
        """Event id → number of skipped events."""
        self._vocabulary = core.events
        self._upcasters = core.upcasters
        self._written_by = (
            f"it was written by kvledger {header.get('kvledger_version', 'unknown')}: use that or a later one"
        )
        self._num_slots = _num_slots(header)
        self._converters: dict[type, _Convert] = {}
        wire_classes = [
            self._wire_class(code, declared, lenient=lenient) for code, declared in enumerate(self._declared(header))
        ]
        self._decode: Callable[[bytes], list[Any]] = _no_events
        if wire_classes:
            self._decode = msgpack_decoder(list[Union[tuple(wire_classes)]])  # type: ignore[misc] # noqa: UP007

    def decode(self, payload: bytes) -> list[Event]:
        """Return the known events of one payload: all of them, unless the decoder is lenient.

        Raises:
            CodecError: the payload does not match the header, or a number is outside its range.
        """
        return self.decode_frame(payload).events

    def decode_frame(self, payload: bytes) -> DecodedFrame:
        """Return the same with the positions of skipped events, so that sequence numbers stay right.

        Raises:
            CodecError: the payload does not match the header, or a number is outside its range.
        """
        decoded = self._decoded(payload)
        if not self._converters:
            self._check(payload, decoded)
            return DecodedFrame(decoded)
        events: list[Event] = []
        skipped: list[int] = []
        for place, wired in enumerate(decoded):
            convert = self._converters.get(type(wired))
            try:
                event = wired if convert is None else convert(wired)
            except Exception as error:  # an upcaster may fail on any field of a damaged event
                raise _broken_promise(payload, error) from error
            if event is None:
                skipped.append(place)
            else:
                events.append(event)
        self._check(payload, events)
        return DecodedFrame(events, tuple(skipped))

    def _check(self, payload: bytes, events: Iterable[Event]) -> None:
        """Check slots against the pool size in the header. Rules check the numbers that the header does not limit."""
        for event in events:
            if type(event) in _WITH_SLOTS:
                largest = max(cast("LoadIssued | SaveIssued | TailSaveIssued", event).slots, default=0)
                if largest >= self._num_slots:
                    message = f"{event.id} names slot {largest}, but the pool has {self._num_slots} slots"
                    raise _broken_promise(payload, Undecodable(message))

    def _decoded(self, payload: bytes) -> list[Any]:
        try:
            return self._decode(payload)
        except Undecodable as error:
            raise _broken_promise(payload, error) from error

    def _declared(self, header: Mapping[str, Any]) -> list[_Declared]:
        try:
            schema_version: int = converted(header.get("schema_version"), int)
            if schema_version > SCHEMA_VERSION:
                message = (
                    f"the log has schema version {schema_version}, but this kvledger reads {SCHEMA_VERSION}; "
                    f"{self._written_by}"
                )
                raise SchemaTooNew(message)
            if schema_version < SCHEMA_VERSION:
                version = header.get("kvledger_version", "unknown")
                message = (
                    f"the log has schema version {schema_version}, written by kvledger {version}; read it with that "
                    "version"
                )
                raise CodecError(message)
            return converted(header.get("vocabulary"), list[_Declared])
        except Undecodable as error:
            message = f"the log's header has no readable vocabulary ({error}); kvledger's connector did not write it"
            raise CodecError(message) from error

    def _wire_class(self, code: int, declared: _Declared, *, lenient: bool) -> type:
        """Return the class to decode an array with this code: the event's, or a stand-in that has a converter."""
        event_class = self._vocabulary.get(declared.id)
        if event_class is None or declared.version > event_class.version:
            if not lenient:
                raise self._too_new(declared, event_class)
            stand_in = _stand_in(code, [Any] * len(declared.fields))
            self._converters[stand_in] = lambda _wired: self.num_skipped.update((declared.id,))
            return stand_in
        if declared.version < event_class.version:
            return self._older(code, declared, event_class)
        if tuple(declared.fields) not in _known_fields(event_class):
            message = (
                f"the log's header lists for {declared.id} version {declared.version} the fields "
                f"{', '.join(declared.fields)}, but it has {', '.join(field_names(event_class))}: "
                "the header is damaged, or another program wrote the log"
            )
            raise CodecError(message)
        if wire_code(event_class) == code:
            return event_class
        hints = get_type_hints(event_class, include_extras=True)
        stand_in = _stand_in(code, [hints[name] for name in declared.fields])
        self._converters[stand_in] = lambda wired: event_class(*msgspec.structs.astuple(wired))
        return stand_in

    def _older(self, code: int, declared: _Declared, event_class: type[Event]) -> type:
        stand_in = _stand_in(code, [Any] * len(declared.fields))
        hints = get_type_hints(event_class, include_extras=True)
        names = field_names(event_class)

        def convert(wired: msgspec.Struct) -> Event:
            fields = dict(zip(declared.fields, msgspec.structs.astuple(wired), strict=True))
            fields = dict(
                upcast(
                    self._upcasters,
                    declared.id,
                    fields,
                    from_version=declared.version,
                    to_version=event_class.version,
                )
            )
            values = {name: msgspec.convert(fields.pop(name), hints[name]) for name in names}
            if fields:
                left = ", ".join(fields)
                message = (
                    f"{declared.id}: its upcasters leave {left}, which version {event_class.version} does not have"
                )
                raise CodecError(message)
            return event_class(**values)

        self._converters[stand_in] = convert
        return stand_in

    def _too_new(self, declared: _Declared, event_class: type[Event] | None) -> SchemaTooNew:
        known = "no version" if event_class is None else f"version {event_class.version}"
        return SchemaTooNew(
            f"the log uses {declared.id} version {declared.version}, but this kvledger knows {known}; "
            f"{self._written_by}"
        )


def _known_fields(event_class: type[Event]) -> list[tuple[str, ...]]:
    """Return the field lists that today's and earlier writers declare. Later fields are last and have defaults."""
    names, num_defaults = field_names(event_class), len(event_class.__struct_defaults__)
    return [names[: len(names) - num_missing] for num_missing in range(num_defaults + 1)]


def _stand_in(code: int, types: Sequence[Any]) -> type:
    """Return a class with fields of these types, which msgspec decodes from an array with this code."""
    fields = [(f"field_{place}", kind) for place, kind in enumerate(types)]
    return msgspec.defstruct(
        f"WireCode{code}", fields, array_like=True, tag=code, forbid_unknown_fields=True, frozen=True, gc=False
    )


def _no_events(_payload: bytes) -> list[Any]:
    raise Undecodable("the header lists no events")


def _num_slots(header: Mapping[str, Any]) -> int:
    """Slots of the host pool; the maximum if the header does not name their number."""
    configuration = header.get("configuration")
    num_slots = configuration.get("num_slots") if isinstance(configuration, Mapping) else None
    return num_slots if isinstance(num_slots, int) else MAX_SLOTS


def _broken_promise(payload: bytes, error: Exception) -> CodecError:
    text = str(error) if isinstance(error, Undecodable) else repr(error)
    return CodecError(f"a payload of {len(payload)} bytes does not match the log's header: {text}")
