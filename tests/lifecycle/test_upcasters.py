"""Logs outlive versions: old events become today's step by step; what is too new is refused, or skipped and counted."""

from __future__ import annotations

from typing import Any

import attrs
import msgspec
import pytest

from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import SCHEMA_VERSION, CodecError, EventDecoder, SchemaTooNew
from kvledger.lifecycle.upcasters import Fields, Upcaster, UpcasterError, Upcasters, check_upcasters

STANDARD = dict(Core.standard().events)


class Moved(e.Event, frozen=True, tag=len(STANDARD)):
    """An event in its third version."""

    distance_mm: int
    unit: str
    time_ns: int


class Stood(e.Event, frozen=True, tag=len(STANDARD) + 1):
    """An event in its first."""

    time_ns: int


Moved.id, Moved.version = "test.moved", 3
Stood.id, Stood.version = "test.stood", 1
VOCABULARY: dict[str, type[e.Event]] = {"test.moved": Moved, "test.stood": Stood}


def _metres_to_millimetres(fields: Fields) -> Fields:
    return {"distance_mm": 1000 * fields["distance_m"], "time_ns": fields["time_ns"]}


def _with_a_unit(fields: Fields) -> Fields:
    return {**fields, "unit": "mm"}


UPCASTERS: dict[tuple[str, int], Upcaster] = {
    ("test.moved", 1): _metres_to_millimetres,
    ("test.moved", 2): _with_a_unit,
}
"""Metres became millimetres, then the unit of the reader was told."""


def declared(event_id: str, version: int, *fields: str) -> dict[str, Any]:
    """One entry of a header's vocabulary."""
    return {"id": event_id, "version": version, "fields": list(fields)}


def header(*vocabulary: dict[str, Any]) -> dict[str, Any]:
    """The header of a log with this vocabulary."""
    return {"schema_version": SCHEMA_VERSION, "vocabulary": list(vocabulary), "kvledger_version": "9.8.7"}


V1 = declared("test.moved", 1, "distance_m", "time_ns")
V2 = declared("test.moved", 2, "distance_mm", "time_ns")
V3 = declared("test.moved", 3, "distance_mm", "unit", "time_ns")
V4 = declared("test.moved", 4, "distance_mm", "unit", "time_ns", "direction")
STOOD = declared("test.stood", 1, "time_ns")
TELEPORTED = declared("test.teleported", 1, "from", "to")


def decoder(*vocabulary: dict[str, Any], lenient: bool = False, chain: Upcasters = UPCASTERS) -> EventDecoder:
    """A decoder of the test's own vocabulary."""
    return EventDecoder(core(chain), header(*vocabulary), lenient=lenient)


def core(chain: Upcasters = UPCASTERS) -> Core:
    """The standard core with the test's own events."""
    return attrs.evolve(Core.standard(), events=STANDARD | VOCABULARY, upcasters=chain)


def payload(*events: tuple[Any, ...]) -> bytes:
    """Events as they stand in a frame."""
    return msgspec.msgpack.encode(events)


# --- old versions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "fields"), [(V1, (2, 7)), (V2, (2000, 7)), (V3, (2000, "mm", 7))])
def test_every_version_is_read_as_todays_event(version: dict[str, Any], fields: tuple[Any, ...]) -> None:
    """One, two or no steps lead to the same event."""
    assert decoder(version).decode(payload((0, *fields))) == [Moved(2000, "mm", 7)]


def test_versions_stand_beside_one_another_in_one_log() -> None:
    """Each wire code is read by what the header says of it."""
    read = decoder(STOOD, V1, V3).decode(payload((1, 2, 7), (0, 8), (2, 5, "mm", 9)))
    assert read == [Moved(2000, "mm", 7), Stood(8), Moved(5, "mm", 9)]


def test_an_old_event_with_a_wrong_type_is_refused() -> None:
    """What the upcasters make of it is checked as if it had been read."""
    with pytest.raises(CodecError, match="does not match the log's header"):
        decoder(V2).decode(payload((0, "far", 7)))


def test_an_old_event_that_an_upcaster_stumbles_over_is_a_codec_error() -> None:
    """A damaged event must not end a reader with an error of an upcaster."""
    with pytest.raises(CodecError, match="does not match the log's header"):
        decoder(V1).decode(payload((0, None, 7)))


@pytest.mark.parametrize("fields", [(2,), (2, 7, 1)])
def test_an_old_event_with_too_few_or_too_many_fields_is_refused(fields: tuple[Any, ...]) -> None:
    """The header tells how many the old version had."""
    with pytest.raises(CodecError):
        decoder(V1).decode(payload((0, *fields)))


def test_fields_that_the_header_names_otherwise_than_the_version_has_them_are_refused() -> None:
    """A version never changes its fields; reading them in another order would swap their meanings."""
    named = r"test\.moved version 3 the fields unit, distance_mm, time_ns, but that version has"
    with pytest.raises(CodecError, match=named):
        decoder(declared("test.moved", 3, "unit", "distance_mm", "time_ns"))


def test_fields_that_upcasters_leave_over_are_refused() -> None:
    """An upcaster that forgets to take away what is gone is found by the first log it reads."""
    chain = UPCASTERS | {("test.moved", 1): lambda fields: {**fields, "distance_mm": 1}}
    with pytest.raises(CodecError, match="the upcasters leave the fields distance_m, which version 3 does not have"):
        decoder(V1, chain=chain).decode(payload((0, 2, 7)))


# --- upcasters are checked when a core is made -------------------------------------------------------


def test_no_core_is_made_whose_events_of_older_versions_cannot_be_read() -> None:
    """The standard one was made; this one lacks both steps."""
    with pytest.raises(UpcasterError, match=r"test\.moved.*no upcaster leads from version 1 to 2"):
        core({})


def test_a_whole_chain_is_accepted() -> None:
    """Every version from the first on leads to the next."""
    check_upcasters(UPCASTERS, VOCABULARY)


@pytest.mark.parametrize("missing", [1, 2])
def test_a_gap_is_named_with_event_versions_and_remedy(missing: int) -> None:
    """Otherwise the first old log would find it."""
    message = rf"test\.moved.*version 3.*no upcaster leads from version {missing} to {missing + 1}.*add one"
    with pytest.raises(UpcasterError, match=message):
        core({("test.moved", 3 - missing): dict})


def test_an_upcaster_of_an_unknown_event_is_refused() -> None:
    """A misspelt id would never be used."""
    with pytest.raises(UpcasterError, match=r"test\.mvoed.*no such event; correct the id"):
        core(UPCASTERS | {("test.mvoed", 1): dict})


@pytest.mark.parametrize("version", [0, 3, 7])
def test_an_upcaster_from_a_version_that_is_not_older_is_refused(version: int) -> None:
    """Whoever wrote it forgot to raise the event's version."""
    with pytest.raises(
        UpcasterError, match=rf"from version {version}, but the event is in version 3; raise the version"
    ):
        core(UPCASTERS | {("test.moved", version): dict})


# --- too new ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("entry", "known"), [(V4, "version 3"), (TELEPORTED, "no such event")])
def test_what_is_too_new_is_refused_unless_asked_otherwise(entry: dict[str, Any], known: str) -> None:
    """The message names the event, both versions and the kvledger that wrote it."""
    with pytest.raises(SchemaTooNew, match=rf"{entry['id']} version {entry['version']}.*knows {known}.*9\.8\.7"):
        decoder(STOOD, entry)


@pytest.mark.parametrize(("entry", "fields"), [(V4, (1, "mm", 2, "up")), (TELEPORTED, ({"a": 1}, None))])
def test_a_lenient_decoder_skips_and_counts_what_is_too_new(entry: dict[str, Any], fields: tuple[Any, ...]) -> None:
    """Whatever its fields hold; the positions tell which sequence numbers are skipped."""
    lenient = decoder(STOOD, entry, lenient=True)
    frame = lenient.decode_frame(payload((1, *fields), (0, 5), (1, *fields), (0, 6)))
    assert frame.events == [Stood(5), Stood(6)]
    assert frame.skipped == (0, 2)
    assert frame.num_events == 4
    assert list(frame.numbered(10)) == [(11, Stood(5)), (13, Stood(6))]
    assert lenient.num_skipped == {entry["id"]: 2}
    assert lenient.decode(payload((0, 7), (1, *fields))) == [Stood(7)]
    assert lenient.num_skipped == {entry["id"]: 3}


def test_a_lenient_decoder_numbers_a_frame_without_anything_new_without_a_jump() -> None:
    """Nothing is skipped, nothing is counted."""
    lenient = decoder(STOOD, TELEPORTED, lenient=True)
    frame = lenient.decode_frame(payload((0, 5), (0, 6)))
    assert list(frame.numbered(1)) == [(1, Stood(5)), (2, Stood(6))]
    assert frame.skipped == ()
    assert not lenient.num_skipped


def test_a_frame_of_nothing_but_what_is_too_new_has_no_events() -> None:
    """Its sequence numbers are accounted for all the same."""
    frame = decoder(TELEPORTED, lenient=True).decode_frame(payload((0, 1, 2), (0, 3, 4)))
    assert (frame.events, frame.skipped, frame.num_events) == ([], (0, 1), 2)
    assert list(frame.numbered(5)) == []


def test_a_lenient_decoder_is_strict_about_damage() -> None:
    """Unknown is not the same as broken: the header tells how many fields even an unknown event has."""
    lenient = decoder(STOOD, TELEPORTED, lenient=True)
    for broken in (payload((1, 1)), payload((2, 1)), payload((0, "late")), b"\xc1"):
        with pytest.raises(CodecError):
            lenient.decode_frame(broken)


def test_a_newer_schema_is_refused_also_by_a_lenient_decoder() -> None:
    """It may mean something else by everything."""
    with pytest.raises(SchemaTooNew, match=f"schema version {SCHEMA_VERSION + 1}"):
        EventDecoder(core(), {**header(STOOD), "schema_version": SCHEMA_VERSION + 1}, lenient=True)


def test_a_real_log_with_one_event_of_a_later_release_is_read_but_for_that() -> None:
    """The whole vocabulary of today, and one id more."""
    names = [declared(x.id, x.version, *x.__struct_fields__) for x in Core.standard().events.values()]
    lenient = EventDecoder(Core.standard(), header(*names, TELEPORTED), lenient=True)
    note = (list(Core.standard().events).index("log.note"), "start", 5)
    frame = lenient.decode_frame(payload((len(names), 1, 2), note))
    assert list(frame.numbered(100)) == [(101, e.LogNote("start", 5))]
    assert lenient.num_skipped == {"test.teleported": 1}
