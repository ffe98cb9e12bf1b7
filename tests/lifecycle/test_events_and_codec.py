"""The vocabulary is stable, and what was written once can be read for ever."""

from __future__ import annotations

import contextlib
import json
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import (
    SCHEMA_VERSION,
    CodecError,
    EventDecoder,
    SchemaTooNew,
    encode_events,
    vocabulary_header,
)

EVENTS = list(Core.standard().events.values())
PRIVATE = {"token_ids", "prompt", "prompt_token_ids", "text_prompt", "salt", "cache_salt", "prompt_embeds"}
each_event = pytest.mark.parametrize("event_class", EVENTS, ids=lambda event_class: event_class.id)


def types_of(event_class: type[e.Event]) -> dict[str, Any]:
    """Field name -> annotation, in wire order."""
    hints = typing.get_type_hints(event_class, include_extras=True)
    return {name: hints[name] for name in e.field_names(event_class)}


def entries_of(annotation: Any) -> tuple[Any, ...]:
    """The types of the entries of a tuple, named ones included."""
    if hasattr(annotation, "_fields"):
        return tuple(typing.get_type_hints(annotation, include_extras=True).values())
    return typing.get_args(annotation)


def is_tuple(annotation: Any) -> bool:
    """Whether values of the type are tuples."""
    return typing.get_origin(annotation) is tuple or hasattr(annotation, "_fields")


def range_of(annotation: Any) -> tuple[int, int] | None:
    """The least and the largest number of a type with a range; None for any other type."""
    if typing.get_origin(annotation) is not typing.Annotated:
        return None
    (meta,) = annotation.__metadata__
    return meta.ge, meta.le


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation of an event's field."""
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**63), 2**64 - 1),
        str: st.text(max_size=20),
        bytes: st.binary(max_size=40),
        bool: st.booleans(),
    }
    if annotation in simple:
        return simple[annotation]
    limits = range_of(annotation)
    if limits is not None:
        return st.integers(*limits)
    assert is_tuple(annotation), f"{annotation} is not a plain type"
    arguments = entries_of(annotation)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=4).map(tuple)
    return st.tuples(*map(values_of, arguments)).map(made_of(annotation))


def made_of(annotation: Any) -> Any:
    """What makes a value of a tuple's type out of its entries."""
    return annotation._make if hasattr(annotation, "_fields") else tuple


def example_of(annotation: Any, seed: int) -> Any:
    """A fixed value of an annotation, for golden files."""
    simple = {int: 1000 * seed + 7, str: f"text {seed} ü", bytes: bytes(range(seed, seed + 16)), bool: True}
    if range_of(annotation) is not None:
        return simple[int]
    if annotation in simple:
        return simple[annotation]
    arguments = entries_of(annotation)
    if arguments[1] is Ellipsis:
        return tuple(example_of(arguments[0], seed + extra) for extra in range(2))
    return made_of(annotation)(example_of(argument, seed + extra) for extra, argument in enumerate(arguments))


@st.composite
def any_event(draw: st.DrawFn, classes: typing.Sequence[type[e.Event]] = EVENTS) -> e.Event:
    """An event of any class with any values of its fields' types."""
    event_class = draw(st.sampled_from(classes))
    return event_class(**{name: draw(values_of(annotation)) for name, annotation in types_of(event_class).items()})


def is_plain(annotation: Any) -> bool:
    """Whether a field's type is made of ints, strings, bytes, booleans and tuples of them only."""
    if annotation in {int, str, bytes, bool} or range_of(annotation) is not None:
        return True
    arguments = [argument for argument in entries_of(annotation) if argument is not Ellipsis]
    return is_tuple(annotation) and all(map(is_plain, arguments))


# --- the vocabulary ------------------------------------------------------------------------------


def test_ids_versions_and_fields_are_the_golden_list(golden: Any) -> None:
    """What a log can contain changes only where somebody reads the change."""
    lines = []
    for event in EVENTS:
        kind = "decision" if event.is_decision else "observation"
        fields = ", ".join(e.field_names(event))
        lines.append(f"{event.id}/{event.version} {kind} ({fields})")
    golden.check("vocabulary.txt", "\n".join(lines) + "\n")


def test_no_two_events_share_an_id_a_class_or_a_handler_method() -> None:
    """An id and a method name each mean one event: of two with one id the later would be missing."""
    assert set(EVENTS) == {event for event in vars(e).values() if isinstance(event, type) and hasattr(event, "version")}
    assert len({event.handler_method for event in EVENTS}) == len(EVENTS)


def test_wire_codes_are_numbers_without_a_gap() -> None:
    """A header names them by the place in its list; the order of the classes means nothing."""
    assert [e.wire_code(event) for event in Core.standard().events.values()] == list(range(len(EVENTS)))


def test_every_event_is_an_observation_or_a_decision() -> None:
    """The two kinds are all there is."""
    assert set(Core.standard().observations) | set(Core.standard().decisions) == set(EVENTS)
    assert not set(Core.standard().observations) & set(Core.standard().decisions)


@each_event
def test_a_decision_names_its_cause_and_an_observation_its_time(event_class: type[e.Event]) -> None:
    """A log answers why by `cause`; times enter with observations and never with decisions."""
    fields = set(e.field_names(event_class))
    if event_class.is_decision:
        assert "cause" in fields
        assert "time_ns" not in fields
    else:
        assert "cause" not in fields
        # These come with others that tell the time.
        assert "time_ns" in fields or event_class in {
            e.ChunkKeysObserved,
            e.EffectsDelivered,
            e.StepReported,
            e.HooksExchanged,
        }


@each_event
def test_no_event_has_a_place_for_private_data(event_class: type[e.Event]) -> None:
    """Token ids, prompts and salts never enter the log; chunk keys and counts do."""
    assert not set(e.field_names(event_class)) & PRIVATE
    assert not [name for name in e.field_names(event_class) if "prompt" in name and not name.startswith("num_")]
    assert not [name for name in e.field_names(event_class) if "token" in name and not name.startswith(("num_", "first_"))]  # fmt: skip  # noqa: E501


@each_event
def test_an_event_holds_plain_values_and_cannot_be_changed(event_class: type[e.Event]) -> None:
    """Frozen, equal by value, and made of ints, strings, bytes, booleans and tuples of them."""
    annotations = types_of(event_class)
    assert all(map(is_plain, annotations.values())), annotations
    values = {name: example_of(annotation, 3) for name, annotation in annotations.items()}
    event = event_class(**values)
    assert event == event_class(**values)
    with pytest.raises(AttributeError, match="immutable"):
        setattr(event, next(iter(values)), 0)


# --- the codec -----------------------------------------------------------------------------------


@each_event
@settings(max_examples=20)
@given(data=st.data())
def test_an_event_is_read_as_it_was_written(event_class: type[e.Event], data: st.DataObject) -> None:
    """For every class and any values of its fields' types."""
    event = data.draw(any_event([event_class]))
    (decoded,) = EventDecoder(Core.standard(), vocabulary_header(Core.standard())).decode(encode_events([event]))
    assert decoded == event
    assert {name: type(value) for name, value in msgspec.structs.asdict(decoded).items()} == {
        name: type(value) for name, value in msgspec.structs.asdict(event).items()
    }


@given(events=st.lists(any_event(), max_size=6))
def test_a_payload_keeps_its_events_in_order(events: list[e.Event]) -> None:
    """Also when it is empty."""
    assert EventDecoder(Core.standard(), vocabulary_header(Core.standard())).decode(encode_events(events)) == events


def test_an_event_of_a_log_from_before_its_last_fields_has_their_defaults() -> None:
    """Each field that was added behind the others says of such a log that it was not recorded."""
    header = vocabulary_header(Core.standard())
    entries = {entry["id"]: entry for entry in header["vocabulary"]}  # type: ignore[attr-defined]
    for event_id in ("request.preempted", "request.finished"):
        del entries[event_id]["fields"][5:]
    written = [["r", 8, 9, 4, True], ["r", "FINISHED_STOPPED", 8, 9, 4], [0, 1, [], [], [], [[7, 2, 32]], 5]]
    classes = (e.RequestPreempted, e.RequestFinished, e.StepScheduled)
    arrays = [[e.wire_code(event_class), *fields] for event_class, fields in zip(classes, written, strict=True)]
    assert EventDecoder(Core.standard(), header).decode(msgspec.msgpack.encode(arrays)) == [
        e.RequestPreempted("r", 8, 9, 4, True, e.NOT_RECORDED),
        e.RequestFinished("r", "FINISHED_STOPPED", 8, 9, 4, num_computed_tokens=e.NOT_RECORDED),
        e.StepScheduled(0, 1, (), (), (), (e.SettledTokens(7, 2, 32, e.NOT_RECORDED),), 5),
    ]


def golden_vocabulary(golden: Any) -> list[dict[str, Any]]:
    """The vocabulary under which the golden payloads were written."""
    header: dict[str, Any] = json.loads(golden.read("events-v3/header.json"))
    vocabulary: list[dict[str, Any]] = header["vocabulary"]
    return vocabulary


def test_every_event_version_has_a_golden_payload(golden: Any) -> None:
    """A new event or version adds a file; what is there is never written again."""
    golden.add("events-v3/header.json", json.dumps({"schema_version": SCHEMA_VERSION, "vocabulary": []}))
    vocabulary = golden_vocabulary(golden)
    known = {(entry["id"], entry["version"]) for entry in vocabulary}
    for entry in vocabulary_header(Core.standard())["vocabulary"]:  # type: ignore[attr-defined]
        event_class = Core.standard().events[entry["id"]]
        if golden.rewrite and (entry["id"], entry["version"]) not in known:
            vocabulary.append(entry)
            header = {"schema_version": SCHEMA_VERSION, "vocabulary": vocabulary}
            golden.check("events-v3/header.json", json.dumps(header, indent=1) + "\n")
        code = [(other["id"], other["version"]) for other in vocabulary].index((entry["id"], entry["version"]))
        fields = [example_of(annotation, index) for index, annotation in enumerate(types_of(event_class).values())]
        payload = msgspec.msgpack.encode([(code, *fields)]).hex()
        golden.add(f"events-v3/{event_class.id}-{event_class.version}.hex", payload + "\n")
    names = {f"{entry['id']}-{entry['version']}.hex" for entry in vocabulary}
    assert set(golden.names("events-v3", ".hex")) == names
    assert {(event.id, event.version) for event in EVENTS} <= {(x["id"], x["version"]) for x in vocabulary}


@each_event
def test_a_golden_payload_is_read_and_written_to_the_byte(golden: Any, event_class: type[e.Event]) -> None:
    """Logs of every release stay readable, and the wire form of a released version never moves.

    Wire codes may move, as the log's header lists them; so the payload is compared under the golden codes.
    """
    vocabulary = golden_vocabulary(golden)
    payload = bytes.fromhex(golden.read(f"events-v3/{event_class.id}-{event_class.version}.hex"))
    (event,) = EventDecoder(Core.standard(), {"schema_version": SCHEMA_VERSION, "vocabulary": vocabulary}).decode(
        payload
    )
    annotations = types_of(event_class)
    assert event == event_class(*(example_of(type_, index) for index, type_ in enumerate(annotations.values())))
    ((_, *fields),) = msgspec.msgpack.decode(encode_events([event]))
    code = [(entry["id"], entry["version"]) for entry in vocabulary].index((event_class.id, event_class.version))
    assert msgspec.msgpack.encode([[code, *fields]]) == payload


def test_every_golden_payload_of_any_version_is_still_readable(golden: Any) -> None:
    """Also those of versions that this code no longer writes."""
    decoder = EventDecoder(Core.standard(), {"schema_version": SCHEMA_VERSION, "vocabulary": golden_vocabulary(golden)})
    names = golden.names("events-v3", ".hex")
    assert len(names) >= len(EVENTS)
    for name in names:
        (event,) = decoder.decode(bytes.fromhex(golden.read(f"events-v3/{name}")))
        assert name.startswith(f"{event.id}-")


def test_a_log_with_other_wire_codes_is_read_by_its_own_header() -> None:
    """The header's order decides, not the order in which today's classes are declared."""
    header = vocabulary_header(Core.standard())
    header["vocabulary"] = list(reversed(header["vocabulary"]))  # type: ignore[call-overload]
    note = e.LogNote("start", 5)
    code = [entry["id"] for entry in header["vocabulary"]].index(note.id)
    assert EventDecoder(Core.standard(), header).decode(msgspec.msgpack.encode([(code, "start", 5)])) == [note]


def test_a_newer_schema_is_refused_and_the_needed_version_named() -> None:
    """Reading it anyway could misunderstand it."""
    header = {**vocabulary_header(Core.standard()), "schema_version": SCHEMA_VERSION + 1, "kvledger_version": "9.8.7"}
    with pytest.raises(
        SchemaTooNew, match=rf"schema version {SCHEMA_VERSION + 1}.*reads version {SCHEMA_VERSION}.*9\.8\.7"
    ):
        EventDecoder(Core.standard(), header)


@pytest.mark.parametrize("schema_version", range(SCHEMA_VERSION))
def test_an_earlier_schema_is_refused_and_the_version_that_reads_it_named(schema_version: int) -> None:
    """Nothing of it means what it says today."""
    header = {**vocabulary_header(Core.standard()), "schema_version": schema_version, "kvledger_version": "0.0.1"}
    with pytest.raises(
        CodecError,
        match=rf"has schema version {schema_version}, .* kvledger 0\.0\.1 wrote the log: read it with that version",
    ):
        EventDecoder(Core.standard(), header, lenient=True)


def test_a_newer_version_of_an_event_is_refused_and_the_needed_version_named() -> None:
    """The message names the event, both versions and the kvledger that wrote it."""
    vocabulary = [{"id": "request.arrived", "version": 2, "fields": []}]
    header = {"schema_version": SCHEMA_VERSION, "vocabulary": vocabulary, "kvledger_version": "9.8.7"}
    with pytest.raises(SchemaTooNew, match=r"request\.arrived version 2.*knows version 1.*9\.8\.7"):
        EventDecoder(Core.standard(), header)


def test_an_unknown_event_is_refused_and_the_needed_version_named() -> None:
    """An event of a later release, or of another product."""
    vocabulary = [{"id": "request.teleported", "version": 1, "fields": []}]
    header = {"schema_version": SCHEMA_VERSION, "vocabulary": vocabulary, "kvledger_version": "9.8.7"}
    with pytest.raises(SchemaTooNew, match=r"request\.teleported version 1.*knows no such event.*9\.8\.7"):
        EventDecoder(Core.standard(), header)


@pytest.mark.parametrize("header", [{}, {"schema_version": SCHEMA_VERSION}, {"vocabulary": []}, {"schema_version": "1", "vocabulary": []}])  # fmt: skip  # noqa: E501
def test_a_header_without_a_vocabulary_is_refused(header: dict[str, Any]) -> None:
    """It was not written by a kvledger connector, and the message says so."""
    with pytest.raises(CodecError, match=r"`vocabulary`.* in the log's header cannot be read"):
        EventDecoder(Core.standard(), header)


@pytest.mark.parametrize("entry", [1, "request.arrived", [], {}, {"id": "request.arrived"}, {"id": [], "version": 1}, {"id": "request.arrived", "version": "1"}], ids=repr)  # fmt: skip  # noqa: E501
def test_a_header_with_a_broken_vocabulary_is_refused(entry: Any) -> None:
    """A damaged entry is a `CodecError`, never another exception."""
    with pytest.raises(CodecError):
        EventDecoder(Core.standard(), {"schema_version": SCHEMA_VERSION, "vocabulary": [entry]})


DECODER = EventDecoder(Core.standard(), vocabulary_header(Core.standard()))


@given(payload=st.binary(max_size=200))
def test_a_garbage_payload_raises_a_codec_error_and_nothing_else(payload: bytes) -> None:
    """Whatever the bytes are: events or `CodecError`."""
    with contextlib.suppress(CodecError):
        assert all(isinstance(event, e.Event) for event in DECODER.decode(payload))


numbers = st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
json_like = st.recursive(
    st.none() | numbers | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(values=st.lists(st.lists(json_like, max_size=6) | json_like, max_size=3) | json_like)
def test_a_well_formed_payload_of_something_else_raises_a_codec_error_and_nothing_else(values: Any) -> None:
    """Valid msgpack that is not a list of events."""
    with contextlib.suppress(CodecError):
        assert all(isinstance(event, e.Event) for event in DECODER.decode(msgspec.msgpack.encode(values)))


@given(event=any_event(), data=st.data())
def test_a_damaged_event_raises_a_codec_error_and_nothing_else(event: e.Event, data: st.DataObject) -> None:
    """One byte of a good payload replaced, or its end cut off."""
    payload = bytearray(encode_events([event]))
    position = data.draw(st.integers(0, len(payload) - 1))
    payload[position] = data.draw(st.integers(0, 255))
    for damaged in (bytes(payload), bytes(payload[:position])):
        with contextlib.suppress(CodecError):
            assert all(isinstance(read, e.Event) for read in DECODER.decode(damaged))


def test_an_event_without_a_wire_code_raises_a_codec_error() -> None:
    """An empty array where an event should be."""
    with pytest.raises(CodecError):
        DECODER.decode(msgspec.msgpack.encode([[]]))


NOTE_CODE = EVENTS.index(e.LogNote)


@pytest.mark.parametrize("code", [NOTE_CODE - len(EVENTS), NOTE_CODE + len(EVENTS), 2**40, 1.0, "1", None])
def test_a_wire_code_that_the_header_does_not_list_raises_a_codec_error(code: Any) -> None:
    """A negative code must not be read as one counted from the end."""
    with pytest.raises(CodecError):
        DECODER.decode(msgspec.msgpack.encode([[code, "text", 5]]))


def test_a_payload_nested_without_end_raises_a_codec_error() -> None:
    """A stack overflow would be an answer to nobody."""
    with pytest.raises(CodecError):
        DECODER.decode(b"\x91" * 100_000)


def test_an_event_with_too_few_or_too_many_fields_raises_a_codec_error() -> None:
    """The header promised as many fields as the version has."""
    ((code, *fields),) = msgspec.msgpack.decode(encode_events([e.LogNote("start", 5)]))
    for wrong in (fields[:-1], [*fields, 1]):
        with pytest.raises(CodecError, match="does not match the log's header"):
            DECODER.decode(msgspec.msgpack.encode([[code, *wrong]]))
