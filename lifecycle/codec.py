"""Events to bytes and back.

The payload of a frame is one msgpack array of events. An event is an array: its wire code, which is a number for its
class, and then its fields in order. The log's header lists the classes by wire code, so a log describes its own
contents. A test compares the field order of released versions with stored files. `msgspec` checks types when it
decodes.

If the header declares an event as this code does, the event is decoded directly. An event of an older version, or with
another wire code, is first decoded into a class with the fields of the header, and then converted.
"""

from __future__ import annotations

import operator
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
"""Version of the format of logs. Increase it if a reader could misunderstand a log of another kvledger version. Readers
refuse a log with another schema version."""


class CodecError(ValueError):
    """This kvledger cannot decode the events, or the list of event classes in the log's header."""


class SchemaTooNew(CodecError):
    """A newer kvledger wrote the log. The message names that version, which can read the log."""


def vocabulary_header(core: Core) -> dict[str, object]:
    """Return the part of a log's header that a reader needs to decode the log and to know which code decided."""
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
    """Return, as JSON values, the smallest header with which the `kvledger` command can read a log.

    Pass this header when you create the store of the log.
    """
    return {**vocabulary_header(core), "configuration": attrs.asdict(configuration)}


encode_events: Callable[[Sequence[Event]], bytes] = msgspec.msgpack.Encoder(enc_hook=operator.index).encode
"""Encodes the events of one commit into one payload, in order.

Integers of other types, such as `numpy.int64`, become `int`: vLLM counts with them if a connector answers with one.
"""


@attrs.frozen
class DecodedFrame:
    """The known events of one payload, and the positions of skipped events."""

    events: list[Event]
    skipped: tuple[int, ...] = ()
    """Positions of skipped events in the payload, from 0, ascending. Only a lenient decoder skips events."""

    @property
    def num_events(self) -> int:
        """Number of events in the payload, including skipped ones."""
        return len(self.events) + len(self.skipped)

    def numbered(self, first_sequence: int) -> Iterator[tuple[int, Event]]:
        """Yield (sequence number, event) for each known event. The numbers of skipped events do not occur.

        Args:
            first_sequence: sequence number of the first event in the payload.
        """
        if not self.skipped:
            return enumerate(self.events, first_sequence)
        skipped = set(self.skipped)
        places = (place for place in range(self.num_events) if place not in skipped)
        return ((first_sequence + place, event) for place, event in zip(places, self.events, strict=True))


class _Declared(msgspec.Struct):
    """One event class, as the `vocabulary` in a log's header lists it."""

    id: str
    version: int
    fields: list[str]


_WITH_SLOTS = frozenset({LoadIssued, SaveIssued, TailSaveIssued})

_Convert = Callable[[Any], Event | None]
"""Converts an event that was decoded into a stand-in class; returns None if the event is skipped."""


class EventDecoder:
    """Decodes payloads of a log with the given header.

    A `lenient` decoder raises no error for events and event versions that this kvledger does not know. It skips and
    counts them. The folded state then lacks the changes of these events, and the caller must judge whether that state
    is usable.

    Raises:
        SchemaTooNew: the header has a newer schema version. Without `lenient` also: the header has an event, or a
            version of an event, that this kvledger does not know.
        CodecError: the log has an earlier schema version, the list of event classes in its header cannot be read, or
            the header lists other fields for an event than this code has.
    """

    def __init__(self, core: Core, header: Mapping[str, Any], *, lenient: bool = False) -> None:
        self.num_skipped: Counter[str] = Counter()
        """Event id → number of skipped events."""
        self._vocabulary = core.events
        self._upcasters = core.upcasters
        self._written_by = (
            f"kvledger {header.get('kvledger_version', 'unknown')} wrote the log: use that version or a later one"
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
        """Return the events of one payload. A lenient decoder leaves out events that it does not know.

        Raises:
            CodecError: the payload does not match the header, or a number is outside its range.
        """
        return self.decode_frame(payload).events

    def decode_frame(self, payload: bytes) -> DecodedFrame:
        """Return the events of one payload, and the positions of the events that were skipped.

        Skipped events have sequence numbers, too, so the caller needs their positions.

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
        """Raise `CodecError` if an event names a slot outside of the pool. The header has the pool's size.

        Rules check other numbers.
        """
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
                    f"the log has schema version {schema_version}, but this kvledger reads version {SCHEMA_VERSION}; "
                    f"{self._written_by}"
                )
                raise SchemaTooNew(message)
            if schema_version < SCHEMA_VERSION:
                version = header.get("kvledger_version", "unknown")
                message = (
                    f"the log has schema version {schema_version}, which this kvledger cannot read; kvledger {version} "
                    "wrote the log: read it with that version"
                )
                raise CodecError(message)
            return converted(header.get("vocabulary"), list[_Declared])
        except Undecodable as error:
            message = (
                f"the list of event classes (`vocabulary`) in the log's header cannot be read ({error}); kvledger's "
                "connector did not write this header"
            )
            raise CodecError(message) from error

    def _wire_class(self, code: int, declared: _Declared, *, lenient: bool) -> type:
        """Return the class into which msgspec decodes arrays with this wire code.

        This is the event's class if the header declares the event as this code does. Otherwise, it is a stand-in class
        with the header's fields, and `_converters` gets a function that converts the stand-in to the event.
        """
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
                f"{', '.join(declared.fields)}, but that version has {', '.join(field_names(event_class))}; "
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
                    f"{declared.id}: the upcasters leave the fields {left}, which version {event_class.version} does "
                    "not have; remove them in an upcaster"
                )
                raise CodecError(message)
            return event_class(**values)

        self._converters[stand_in] = convert
        return stand_in

    def _too_new(self, declared: _Declared, event_class: type[Event] | None) -> SchemaTooNew:
        known = "no such event" if event_class is None else f"version {event_class.version}"
        return SchemaTooNew(
            f"the log uses {declared.id} version {declared.version}, but this kvledger knows {known}; "
            f"{self._written_by}"
        )


def _known_fields(event_class: type[Event]) -> list[tuple[str, ...]]:
    """Return each list of fields that a header may have for this event: all fields, or all but the last few.

    Older logs lack the fields that were added later. Such fields come last and have defaults.
    """
    names, num_defaults = field_names(event_class), len(event_class.__struct_defaults__)
    return [names[: len(names) - num_missing] for num_missing in range(num_defaults + 1)]


def _stand_in(code: int, types: Sequence[Any]) -> type:
    """Return a class with fields of these types. Msgspec decodes arrays with this wire code into the class."""
    fields = [(f"field_{place}", kind) for place, kind in enumerate(types)]
    return msgspec.defstruct(
        f"WireCode{code}", fields, array_like=True, tag=code, forbid_unknown_fields=True, frozen=True, gc=False
    )


def _no_events(_payload: bytes) -> list[Any]:
    raise Undecodable("the header lists no events")


def _num_slots(header: Mapping[str, Any]) -> int:
    """Return the number of slots in the host pool; the largest possible number if the header does not have it."""
    configuration = header.get("configuration")
    num_slots = configuration.get("num_slots") if isinstance(configuration, Mapping) else None
    return num_slots if isinstance(num_slots, int) else MAX_SLOTS


def _broken_promise(payload: bytes, error: Exception) -> CodecError:
    text = str(error) if isinstance(error, Undecodable) else repr(error)
    return CodecError(f"a payload of {len(payload)} bytes does not match the log's header: {text}")
