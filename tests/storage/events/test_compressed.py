"""A compressed segment is read like the raw one, damage in it costs one block and is named, and nothing expands further
than it states.
"""

from __future__ import annotations

import random
import tracemalloc
import zlib
from pathlib import Path

from log_torture.stored import BLOCK_HEADER_BYTES, blocks_of, forged_block

from kvledger.storage.events import (
    Frame,
    LogReader,
    SegmentEventStore,
    read_ending,
)
from kvledger.storage.events.compressed import MAX_BLOCK_BYTES, encode_block
from kvledger.storage.events.frames import frame_bytes
from kvledger.storage.events.reader import frames_from
from kvledger.storage.events.segment_bytes import SegmentBytes, num_written_bytes
from kvledger.storage.events.segment_file import read_header, segment_paths


def _read(log: Path, from_sequence: int = 1) -> tuple[list[tuple[str, int, Frame]], LogReader]:
    reader = LogReader(log, from_sequence, settle_seconds=0)
    return [(*reader.place, frame) for frame in reader], reader


def _without(frames: list[tuple[str, int, Frame]], segment: Path, start: int, end: int) -> list[tuple[str, int, Frame]]:
    return [each for each in frames if not (each[0] == segment.name and start <= each[1] < end)]


def test_a_compressed_log_reads_like_the_raw_one(raw: Path, compressed: Path) -> None:
    """Frames, their places, hashes and sizes; from the beginning, from each number and from each noted place."""
    segment = segment_paths(compressed)[0]
    assert len(blocks_of(segment)) >= 4
    assert segment.stat().st_size < (raw / segment.name).stat().st_size / 10
    assert num_written_bytes(segment) == (raw / segment.name).stat().st_size
    expected, reader = _read(raw)
    found, other = _read(compressed)
    assert found == expected
    assert other.damage == []
    assert other.head_hash == reader.head_hash
    assert read_ending(compressed) == read_ending(raw)
    for number, (name, offset, frame) in enumerate(expected):
        assert _read(compressed, frame.first_sequence)[0] == expected[number:]
        assert [(place, at, each) for each, place, at in frames_from(compressed, name, offset)] == expected[number:]
    alone, of_segment = _read(segment)
    assert alone == [each for each in expected if each[0] == segment.name]
    assert of_segment.damage == []


def test_every_byte_of_a_segment_can_be_read_back(raw: Path, compressed: Path) -> None:
    """What a shipper sends is the raw segment: header block and frames, each in one piece."""
    segment = segment_paths(compressed)[0]
    with SegmentBytes(segment) as data, SegmentBytes(raw / segment.name) as before:
        start = read_header(segment).num_bytes
        assert data.read(0, start) == before.read(0, start)
        for offset, frame in before.frames(start):
            assert data.read(offset, frame_bytes(frame)) == before.read(offset, frame_bytes(frame))
        assert data.read(data.num_bytes, 10) == b""


def test_a_flipped_bit_costs_at_most_its_block_and_is_named(compressed: Path, raw: Path) -> None:
    """Each byte of a block's header, some of its stream: one report, at the place of what is lost."""
    segment, frames = segment_paths(compressed)[0], _read(raw)[0]
    whole, chance = segment.read_bytes(), random.Random(7)
    for block in blocks_of(segment):
        stream_at = block.at + BLOCK_HEADER_BYTES
        for place in [*range(block.at, stream_at), *range(stream_at, block.end_at, 9)]:
            data = bytearray(whole)
            data[place] ^= 1 << chance.randrange(8)
            segment.write_bytes(data)
            found, reader = _read(compressed)
            assert [(each.kind, each.offset, each.num_bytes) for each in reader.damage] == [
                ("corrupt_block", block.offset, block.num_bytes or 1)
            ], place
            assert found == _without(frames, segment, block.offset, block.end), place
            lost = len(frames) - len(found)
            assert ("no sequence is lost" in reader.damage[0].detail) == (lost == 0)
            assert "of the file" in reader.damage[0].detail


def test_a_flipped_bit_in_the_header_of_a_compressed_segment_costs_no_event(compressed: Path, raw: Path) -> None:
    """There are two copies, as in a raw one; with both damaged the blocks are found."""
    segment, frames = segment_paths(compressed)[0], _read(raw)[0]
    whole = segment.read_bytes()
    size = read_header(segment).num_bytes // 2
    for places in [*((place,) for place in range(2 * size)), (20, size + 20), (3, size + 3), (10, size + 10)]:
        data = bytearray(whole)
        for place in places:
            data[place] ^= 0x10
        segment.write_bytes(data)
        found, reader = _read(compressed)
        assert found == frames, places
        assert [each.kind for each in reader.damage] == ["corrupt_header"], places
    missing = whole[:size] + whole[size + 9 :]
    segment.write_bytes(missing)
    found, reader = _read(compressed)
    assert found == frames
    assert {each.kind for each in reader.damage} == {"corrupt_header"}


def test_a_compressed_segment_cut_at_any_place_says_so_and_keeps_the_blocks_before(compressed: Path, raw: Path) -> None:
    """Cut within a block, between two, before the empty one: a report always, and no frame of a whole block is lost."""
    segment, frames = segment_paths(compressed)[0], _read(raw)[0]
    whole, blocks = segment.read_bytes(), blocks_of(segment)
    cuts = {block.at for block in blocks[1:]} | set(range(blocks[0].at + 1, len(whole), 5)) | {len(whole) - 1}
    for cut in sorted(cuts):
        segment.write_bytes(whole[:cut])
        found, reader = _read(compressed)
        end = max([block.end for block in blocks if block.end_at <= cut], default=blocks[0].offset)
        assert found == _without(frames, segment, end, 1 << 60), cut
        kind = "corrupt_block" if cut >= blocks[0].at + 4 else "corrupt_frame"  # with its marker the form is gone
        assert [(each.kind, each.offset) for each in reader.damage] == [(kind, end)], cut
    segment.write_bytes(whole[: blocks[0].at])
    assert [each.kind for each in _read(compressed)[1].damage] == ["cut_segment"], "it reads like one without frames"


def test_blocks_in_another_order_or_missing_or_repeated_are_named(compressed: Path, raw: Path) -> None:
    """Nothing is read twice or out of order, and bytes between blocks or behind the last cost nothing but a report."""
    segment, frames = segment_paths(compressed)[0], _read(raw)[0]
    whole, blocks = segment.read_bytes(), blocks_of(segment)
    header = whole[: blocks[0].at]
    one, two, three, *rest = (whole[block.at : block.end_at] for block in blocks)
    lost = {
        "missing": ([one, three], [blocks[1]]),
        "repeated": ([one, two, two, three], []),
        "swapped": ([two, one, three], [blocks[0]]),
        "put in": ([one, b"\xc1KVZ" + bytes(90), two, three], []),
        "first missing": ([two, three], [blocks[0]]),
    }
    for name, (parts, gone) in lost.items():
        segment.write_bytes(header + b"".join(parts) + b"".join(rest))
        found, reader = _read(compressed)
        expected = frames
        for block in gone:
            expected = _without(expected, segment, block.offset, block.end)
        assert found == expected, name
        kinds = [each.kind for each in reader.damage]
        assert kinds == (["corrupt_block"] if gone else []), (name, reader.damage)
    segment.write_bytes(whole + b"more")
    found, reader = _read(compressed)
    assert found == frames
    assert [each.kind for each in reader.damage] == ["corrupt_block"]


def _with_block(segment: Path, number: int, block: bytes) -> None:
    segment.write_bytes(block.join(blocks_of(segment)[number].without(segment.read_bytes())))


def test_a_block_that_expands_further_than_it_states_is_refused_and_named(compressed: Path, raw: Path) -> None:
    """A gibibyte in a mebibyte, a size over the limit, less than stated, no zlib stream: no memory is taken for it."""
    segment, frames = segment_paths(compressed)[0], _read(raw)[0]
    whole = segment.read_bytes()
    offset, num_bytes = blocks_of(segment)[1].offset, blocks_of(segment)[1].num_bytes
    part, expander = zlib.compress(bytes(1 << 24)), zlib.compressobj()
    bomb = b"".join(expander.compress(bytes(1 << 24)) for _ in range(80)) + expander.flush()
    assert len(bomb) > 1 << 20
    cases = {
        "expands beyond the": forged_block(offset, num_bytes + len(bomb), bomb),
        "states 16777217 bytes": forged_block(offset, MAX_BLOCK_BYTES + 1, part),
        "over the limit": forged_block(1 << 41, num_bytes, part),
        "compressed bytes for": forged_block(offset, num_bytes, bytes(2 * num_bytes)),
        "does not expand to": forged_block(offset, num_bytes, zlib.compress(bytes(num_bytes - 1))),
        "cannot be expanded": forged_block(offset, num_bytes, b"no stream at all"),
        "does not expand to the ": forged_block(offset, num_bytes, zlib.compress(bytes(num_bytes)) + b"more"),
    }
    assert len(bomb) + num_bytes <= MAX_BLOCK_BYTES
    for text, block in cases.items():
        segment.write_bytes(whole)
        _with_block(segment, 1, block)
        tracemalloc.start()
        found, reader = _read(compressed)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 64 << 20, text
        assert text in reader.damage[0].detail
        assert {each.kind for each in reader.damage} == {"corrupt_block"}
        assert found[: len(found) // 2] == frames[: len(found) // 2], text
        if text != "expands beyond the":  # that one states the next block's bytes too
            assert found == _without(frames, segment, offset, offset + num_bytes), text


def test_a_block_may_hold_bytes_that_are_no_frames(compressed: Path, raw: Path) -> None:
    """It was written so by somebody else: what is no frame in it is named as in a raw segment."""
    segment, frames = segment_paths(compressed)[0], _read(raw)[0]
    offset, num_bytes = blocks_of(segment)[1].offset, blocks_of(segment)[1].num_bytes
    with SegmentBytes(segment) as data:
        inside = bytearray(data.read(offset, num_bytes))
    inside[50] ^= 1
    _with_block(segment, 1, encode_block(offset, bytes(inside)))
    found, reader = _read(compressed)
    assert [(each.kind, each.offset) for each in reader.damage] == [("corrupt_frame", offset)]
    assert len(found) == len(frames) - 1


def test_a_raw_segment_whose_payload_looks_like_blocks_is_raw(tmp_path: Path) -> None:
    """The form is told by what stands behind the header, not by what somebody wrote into an event."""
    store = SegmentEventStore.create(tmp_path, {})
    store.append(encode_block(0, b"false") + encode_block(5, b""), 1)
    store.append(encode_block(200, b""), 1)
    store.close()
    found, reader = _read(tmp_path)
    assert len(found) == 2
    assert reader.damage == []
