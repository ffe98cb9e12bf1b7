"""Whatever was done to a log, at whatever place: it is reported as what it is, and nothing that is intact is hidden.

Each test does one thing at every place of a log of three segments, and expects exact reports: kind, file, offset and
sequence, all of them and no other.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from log_torture.stored import Place, Segment, Stored

from kvledger.storage.events import Frame, FrameKind, LogReader, SegmentEventStore, read_log
from kvledger.storage.events.damage import DAMAGE_KINDS
from kvledger.storage.events.frames import FRAME_HEADER_BYTES, FRAME_MARKER, encode_frame

_NUM_EVENTS = 2
Report = tuple[str, str, int, int | None]
"""Kind, file, offset, sequence."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Write three segments of three frames, all of different sizes."""
    payloads = [b"%d" % number * (10 + number) for number in range(9)]
    stored = Stored.write(tmp_path_factory.mktemp("logs") / "log", payloads, _NUM_EVENTS, segment_bytes=489)
    assert [len(segment.frames) for segment in stored.segments] == [3, 3, 3]
    return stored


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """Write another log with the same sequence numbers."""
    payloads = [b"%c" % (65 + number) * (10 + number) for number in range(9)]
    return Stored.write(tmp_path_factory.mktemp("logs") / "other", payloads, _NUM_EVENTS, segment_bytes=489)


def _read(directory: Path) -> tuple[list[Frame], list[Report]]:
    reader = LogReader(directory, settle_seconds=0)
    frames = list(reader)
    again = [list(reader), [each.kind for each in reader.damage]]
    assert again == [frames, [each.kind for each in reader.damage]], "a second reading differs from the first"
    return frames, [(each.kind, each.segment, each.offset, each.sequence) for each in reader.damage]


def _damaged(stored: Stored, tmp_path: Path) -> tuple[list[Frame], list[Report]]:
    stored.write_to(tmp_path / "log")
    return _read(tmp_path / "log")


def _without(frames: list[Frame], *lost: Frame) -> list[Frame]:
    return [frame for frame in frames if frame not in lost]


def _named(segment: Segment, name: str) -> Segment:
    return Segment(name, segment.header, list(segment.frames))


def test_an_untouched_log_has_no_damage(stored: Stored, tmp_path: Path) -> None:
    """What the tests below damage is sound, also in parts: each segment alone, and from each sequence number."""
    assert _damaged(stored, tmp_path) == (stored.written, [])
    for segment in stored.segments:
        assert _read(tmp_path / "log" / segment.name)[1] == []
    for sequence in range(1, stored.written[-1].next_sequence):
        reader = LogReader(tmp_path / "log", sequence)
        assert list(reader) == [frame for frame in stored.written if frame.next_sequence > sequence]
        assert reader.damage == []


# --- bytes -----------------------------------------------------------------------------------------------------------


def test_a_file_cut_at_any_byte_is_a_torn_tail_or_says_what_is_lost(stored: Stored, tmp_path: Path) -> None:
    """The last segment: a torn tail, or nothing where it ends behind a frame. Others: a corrupt frame, or a cut."""
    for number, segment in enumerate(stored.segments):
        data = segment.header + b"".join(segment.frames)
        starts = [segment.offset_of(frame) for frame in range(len(segment.frames))] + [len(data)]
        is_last = number == len(stored.segments) - 1
        stored.write_to(tmp_path / "log")
        for size in range(len(data)):
            (tmp_path / "log" / segment.name).write_bytes(data[:size])
            frames, reports = _read(tmp_path / "log")
            num_whole = sum(start <= size for start in starts[1:])
            first_lost = stored.frame((number, num_whole))
            lost = [stored.frame((number, frame)) for frame in range(num_whole, len(segment.frames))]
            assert frames == _without(stored.written, *lost), size
            if size < len(segment.header):
                kind, offset = ("torn_tail" if is_last else "corrupt_header"), 0
            elif size in starts:
                kind, offset = "cut_segment", size
            else:
                kind, offset = ("torn_tail" if is_last else "corrupt_frame"), starts[num_whole]
            expected = [(kind, segment.name, offset, first_lost.first_sequence)]
            assert reports == ([] if is_last and size in starts else expected), size


def test_a_flipped_bit_is_a_corrupt_header_or_a_corrupt_frame_at_its_place(stored: Stored, tmp_path: Path) -> None:
    """A header costs no event; a frame costs its own. At the log's end a broken marker or length reads as torn."""
    for number, segment in enumerate(stored.segments):
        data = segment.header + b"".join(segment.frames)
        stored.write_to(tmp_path / "log")
        for offset in range(len(data)):
            flipped = data[:offset] + bytes([data[offset] ^ 1 << offset % 8]) + data[offset + 1 :]
            (tmp_path / "log" / segment.name).write_bytes(flipped)
            frames, reports = _read(tmp_path / "log")
            if offset < len(segment.header):
                sequence, copy_bytes = stored.frame((number, 0)).first_sequence, len(segment.header) // 2
                report = ("corrupt_header", segment.name, 0 if offset < copy_bytes else copy_bytes, sequence)
                assert (frames, reports) == (stored.written, [report]), offset
                continue
            hit = max(frame for frame in range(len(segment.frames)) if segment.offset_of(frame) <= offset)
            lost, start = stored.frame((number, hit)), segment.offset_of(hit)
            is_end = lost == stored.written[-1]
            kind = "torn_tail" if is_end and offset - start in {0, 1, 6, 7, 8, 9} else "corrupt_frame"
            assert reports == [(kind, segment.name, start, lost.first_sequence)], offset
            assert frames == _without(stored.written, lost), offset


def test_one_damaged_copy_of_the_only_header_costs_nothing_but_a_report(tmp_path: Path) -> None:
    """Every byte of the header of a log of one segment in turn: events, header and chain are read from the other."""
    stored = Stored.write(tmp_path / "log", [b"one", b"second", b"3"], _NUM_EVENTS, segment_bytes=1 << 20)
    segment = stored.segments[0]
    path, frames = tmp_path / "log" / segment.name, b"".join(segment.frames)
    copy_bytes = len(segment.header) // 2
    sound = LogReader(tmp_path / "log")
    assert (list(sound), sound.damage) == (stored.written, [])
    for offset in range(len(segment.header)):
        header = bytearray(segment.header)
        header[offset] ^= 0xFF
        path.write_bytes(bytes(header) + frames)
        for log in (path.parent, path):
            reader = LogReader(log, settle_seconds=0)
            assert (list(reader), reader.header, reader.head_hash) == (stored.written, sound.header, sound.head_hash)
            (damage,) = reader.damage
            at = 0 if offset < copy_bytes else copy_bytes
            assert (damage.kind, damage.offset, damage.num_bytes) == ("corrupt_header", at, copy_bytes), offset


def test_a_header_whose_copies_are_both_damaged_costs_no_frame(stored: Stored, tmp_path: Path) -> None:
    """The other segments' headers say what it said; of a log of one segment nothing does, and its frames are read."""
    for number, segment in enumerate(stored.segments):
        log = stored.copy()
        log.segments[number].header = bytes(len(segment.header))
        frames, reports = _damaged(log, tmp_path)
        sequence = stored.frame((number, 0)).first_sequence
        assert (frames, reports) == (stored.written, [("corrupt_header", segment.name, 0, sequence)])
        assert LogReader(tmp_path / "log").header["block_size"] == 16
        alone = LogReader(tmp_path / "log" / segment.name)
        assert [frame.first_sequence for frame in alone] == [
            stored.frame((number, frame)).first_sequence for frame in range(3)
        ]
        assert alone.header == {}


def test_a_missing_second_copy_of_a_header_costs_no_frame(stored: Stored, tmp_path: Path) -> None:
    """Frames that stand where it should are found."""
    for number, segment in enumerate(stored.segments):
        log = stored.copy()
        log.segments[number].header = segment.header[: len(segment.header) // 2]
        frames, reports = _damaged(log, tmp_path)
        sequence = stored.frame((number, 0)).first_sequence
        report = ("corrupt_header", segment.name, len(segment.header) // 2, sequence)
        assert (frames, reports) == (stored.written, [report])


def test_false_frames_within_one_another_are_not_searched_for_ever(tmp_path: Path) -> None:
    """Each says that it ends with the file, and each checksum is wrong: to try them all takes minutes."""
    log = tmp_path / "log"
    store = SegmentEventStore.create(log, {})
    store.append(b"sound", 1)
    store.close()
    (segment,) = log.glob("*.kvlog")
    num_false, data = 400_000, bytearray()
    for number in range(num_false):
        num_payload_bytes = FRAME_HEADER_BYTES * (num_false - number - 1)
        data += struct.pack("<2sIIBQI16s", FRAME_MARKER, 0, num_payload_bytes, 0, 100 + number, 1, b"")
    with segment.open("ab") as file:
        file.write(data)
    reader = read_log(log)
    assert [frame.payload for frame in reader] == [b"sound"]
    assert [damage.kind for damage in reader.damage] == ["torn_tail"]


def test_bytes_put_in_between_frames_cost_nothing(stored: Stored, tmp_path: Path) -> None:
    """They are reported with their number, and the chain goes on behind them."""
    for segment, frame in stored.gaps():
        log = stored.copy()
        offset = log.segments[segment].offset_of(frame)
        log.segments[segment].frames.insert(frame, b"\xf5K no frame")
        frames, reports = _damaged(log, tmp_path)
        is_end = stored.is_end((segment, frame))
        kind = "torn_tail" if is_end else "corrupt_frame"
        assert frames == stored.written
        assert reports == [(kind, log.segments[segment].name, offset, stored.sequence_at((segment, frame)))]


# --- frames ----------------------------------------------------------------------------------------------------------


def test_a_dropped_frame_is_a_gap_or_a_cut_segment(stored: Stored, tmp_path: Path) -> None:
    """Behind the last of a segment, the next segment tells. Without the last of the log, only an anchor does."""
    for segment, frame in stored.places():
        log = stored.copy()
        gone, offset = stored.frame((segment, frame)), log.segments[segment].offset_of(frame)
        del log.segments[segment].frames[frame]
        frames, reports = _damaged(log, tmp_path)
        assert frames == _without(stored.written, gone)
        is_last = frame == len(log.segments[segment].frames)
        kind = "cut_segment" if is_last else "sequence_gap"
        expected = [(kind, log.segments[segment].name, offset, gone.first_sequence)]
        assert reports == ([] if gone == stored.written[-1] else expected)


@pytest.mark.parametrize("segment_bytes", [489, 1 << 20])
def test_swapped_frames_cost_little_more_than_themselves(tmp_path: Path, segment_bytes: int) -> None:
    """Any two frames, neighbours or not, in one segment or in two: what is read is in order, and all else is named."""
    payloads = [b"%d" % number * (10 + number) for number in range(9)]
    stored = Stored.write(tmp_path / "sound", payloads, _NUM_EVENTS, segment_bytes)
    for first, second in itertools.combinations(stored.places(), 2):
        log = stored.copy()
        one, two = log.segments[first[0]].frames, log.segments[second[0]].frames
        one[first[1]], two[second[1]] = two[second[1]], one[first[1]]
        frames, reports = _damaged(log, tmp_path)
        assert frames == [frame for frame in stored.written if frame in frames], (first, second)
        assert len(frames) >= len(stored.written) - 3, (first, second)
        assert {report[0] for report in reports} <= {"chain_broken", "sequence_gap", "cut_segment"}
        assert ("chain_broken", stored.segments[second[0]].name) in [report[:2] for report in reports]


def test_a_repeated_frame_is_left_out_wherever_it_is_put(stored: Stored, tmp_path: Path) -> None:
    """A copy of any frame at any place, before or behind the frame itself: one report, of one of the two."""
    for place, gap in itertools.product(stored.places(), stored.gaps()):
        log = stored.copy()
        copied, sequence = stored.segments[place[0]].frames[place[1]], stored.sequence_at(gap)
        offset, name = log.segments[gap[0]].offset_of(gap[1]), log.segments[gap[0]].name
        log.segments[gap[0]].frames.insert(gap[1], copied)
        frames, reports = _damaged(log, tmp_path)
        assert frames == stored.written, (place, gap)
        if gap == place:  # the copy stands directly before the frame: the second one counts as the copy
            offset, sequence = offset + len(copied), stored.frame(place).next_sequence
        assert reports == [("chain_broken", name, offset, sequence)], (place, gap)


def _foreign_frames(stored: Stored, other: Stored, gap: Place) -> Iterator[tuple[str, bytes, int]]:
    place = stored.sequence_at(gap)
    for sequence in {1, place, max(1, place - 2), place + 2, 1000}:
        forged, _ = encode_frame(FrameKind.EVENTS, sequence, _NUM_EVENTS, b"forged", b"another chain...")
        yield f"forged {sequence}", forged, sequence
    for segment, frame in other.places():
        yield (
            f"other {segment} {frame}",
            other.segments[segment].frames[frame],
            other.frame((segment, frame)).first_sequence,
        )


def test_a_frame_that_somebody_put_in_is_left_out(stored: Stored, other: Stored, tmp_path: Path) -> None:
    """Forged with a good CRC, or copied from another log, with any sequence number, at any place: left out, and said.

    At the very end of the log nothing tells whether it or what stands before it is wrong.
    """
    for gap in stored.gaps():
        for what, put_in, sequence in _foreign_frames(stored, other, gap):
            log = stored.copy()
            offset, name = log.segments[gap[0]].offset_of(gap[1]), log.segments[gap[0]].name
            log.segments[gap[0]].frames.insert(gap[1], put_in)
            frames, reports = _damaged(log, tmp_path)
            end = stored.sequence_at(gap)
            if stored.is_end(gap) and sequence >= end:
                kind = "chain_broken" if sequence == end else "sequence_gap"
                assert reports == [(kind, name, offset, end)], (gap, what)
                assert frames[:-1] == stored.written
            else:
                assert reports == [("chain_broken", name, offset, end)], (gap, what)
                assert frames == stored.written, (gap, what)


def test_a_frame_in_the_place_of_another_is_left_out_and_what_is_lost_is_said(stored: Stored, tmp_path: Path) -> None:
    """A frame overwritten by one that follows from nothing: its events are lost, all others are read."""
    for place in stored.places():
        log, lost = stored.copy(), stored.frame(place)
        forged, _ = encode_frame(FrameKind.EVENTS, lost.first_sequence, _NUM_EVENTS, b"forged", b"another chain...")
        offset, name = log.segments[place[0]].offset_of(place[1]), log.segments[place[0]].name
        log.segments[place[0]].frames[place[1]] = forged
        frames, reports = _damaged(log, tmp_path)
        assert reports == [("chain_broken", name, offset, lost.first_sequence)], place
        if lost != stored.written[-1]:
            assert frames == _without(stored.written, lost)


def test_a_frame_rewritten_with_a_chain_that_fits_breaks_the_next_link(stored: Stored, tmp_path: Path) -> None:
    """Who knows the hash before can forge a frame that follows; what was written behind it does not follow from it."""
    for number, place in enumerate(stored.places()[:-1]):
        log, old = stored.copy(), stored.frame(place)
        if place[1] == 0:
            continue  # the hash before is the header's: the same case as below, with another anchor
        before = stored.written[number - 1].chain_hash
        log.segments[place[0]].frames[place[1]], _ = encode_frame(
            FrameKind.EVENTS, old.first_sequence, _NUM_EVENTS, b"forged", before
        )
        frames, reports = _damaged(log, tmp_path)
        assert len(frames) == len(stored.written)
        assert [(report[0], report[3]) for report in reports] == [("chain_broken", old.next_sequence)], place


# --- segments --------------------------------------------------------------------------------------------------------


def test_a_removed_segment_is_missing_with_its_sequences(stored: Stored, tmp_path: Path) -> None:
    """The first and any in between; without the last the log looks shorter, which only an anchor tells."""
    for number in range(len(stored.segments)):
        log = stored.copy()
        gone = log.segments.pop(number)
        frames, reports = _damaged(log, tmp_path)
        lost = [stored.frame((number, frame)) for frame in range(len(gone.frames))]
        assert frames == _without(stored.written, *lost)
        is_last = number == len(stored.segments) - 1
        following = None if is_last else log.segments[number].name
        assert reports == ([] if is_last else [("missing_segment", following, 0, lost[0].first_sequence)])


def test_a_segment_of_another_log_is_misplaced(stored: Stored, other: Stored, tmp_path: Path) -> None:
    """Beside the log's own, or in the place of one: its events are not mixed in, and what it replaced is missing."""
    for number, segment in enumerate(other.segments):
        log = stored.copy()
        beside = _named(segment, f"{900 + number:020d}.kvlog")
        log.segments.append(beside)
        frames, reports = _damaged(log, tmp_path)
        sequence = other.frame((number, 0)).first_sequence
        assert (frames, reports) == (stored.written, [("misplaced_segment", beside.name, 0, sequence)])
        log = stored.copy()
        log.segments[number] = _named(segment, stored.segments[number].name)
        frames, reports = _damaged(log, tmp_path)
        lost = [stored.frame((number, frame)) for frame in range(3)]
        assert frames == _without(stored.written, *lost)
        is_last = number == len(stored.segments) - 1
        assert [report[0] for report in reports] == ["misplaced_segment", *([] if is_last else ["missing_segment"])]


def test_a_renamed_segment_is_left_out_and_says_its_name(stored: Stored, tmp_path: Path) -> None:
    """Whatever name it has: before, between or behind the others."""
    for number, sequence in itertools.product(range(len(stored.segments)), (0, 2, 8, 14, 999)):
        log, name = stored.copy(), f"{sequence:020d}.kvlog"
        renamed = log.segments[number] = _named(log.segments[number], name)
        frames, reports = _damaged(log, tmp_path)
        lost = [stored.frame((number, frame)) for frame in range(len(renamed.frames))]
        assert frames == _without(stored.written, *lost)
        is_last = number == len(stored.segments) - 1
        following = (
            [] if is_last else [("missing_segment", stored.segments[number + 1].name, 0, lost[0].first_sequence)]
        )
        assert reports == [("misplaced_segment", name, 0, lost[0].first_sequence), *following]


def test_a_segment_that_is_there_twice_is_read_once(stored: Stored, tmp_path: Path) -> None:
    """A copy under another name, whole or without its end, costs nothing."""
    for number, segment in enumerate(stored.segments):
        first = stored.frame((number, 0)).first_sequence
        for sequence, num_frames in itertools.product((0, 2, 999), (1, 3)):
            log = stored.copy()
            copy = _named(segment, f"{sequence:020d}.kvlog")
            copy.frames = copy.frames[:num_frames]
            log.segments.append(copy)
            assert _damaged(log, tmp_path) == (stored.written, [("misplaced_segment", copy.name, 0, first)])


@pytest.mark.parametrize("page", ["log-format.md", "cli.md"])
def test_every_kind_of_damage_is_documented(page: str) -> None:
    """A kind that a page does not name cannot be looked up in an incident."""
    text = (Path(__file__).resolve().parents[3] / "docs" / page).read_text()
    assert [kind for kind in DAMAGE_KINDS if f"`{kind}`" not in text] == []


def test_the_page_on_the_format_says_what_the_code_says() -> None:
    """Each kind's meaning in the documentation is the one in the code."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "log-format.md").read_text()
    assert [kind for kind, meaning in DAMAGE_KINDS.items() if f"| `{kind}` | {meaning} |" not in text] == []
