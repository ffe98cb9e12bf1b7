"""A log on disk taken apart into headers and frames, so that a test can damage it and put it together again."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from pathlib import Path

import attrs
from google_crc32c import value as crc32c

from kvledger.storage.events import Durability, Frame, LogReader, SegmentEventStore, read_log
from kvledger.storage.events.compressed import compress_segment, find_blocks
from kvledger.storage.events.frames import frame_bytes
from kvledger.storage.events.segment_file import read_header, segment_paths
from kvledger.storage.events.segments import LogEnd
from kvledger.storage.events.writer_lock import lock_directory

BLOCK_HEADER_BYTES = 28
Place = tuple[int, int]
"""Segment, and frame in it, both counted from 0."""


def read_to_end(log: Path) -> LogReader:
    """Read a log; its reader then has the damage and the end."""
    reader = read_log(log)
    for _ in reader:
        pass
    return reader


def reopened(log: Path, *, segment_bytes: int = 64 << 20) -> SegmentEventStore:
    """Return a writer that goes on behind the last intact frame of a closed log. The product never does: each start of
    an engine begins another log. It spares tests a writer that stays open.
    """
    lock = lock_directory(log)
    reader = LogReader(log, settle_seconds=0)
    for _ in reader:
        pass
    assert reader.tail is not None
    assert reader.head_hash is not None
    segment, offset = reader.tail
    os.truncate(segment, offset)
    end = LogEnd(segment, offset, reader.next_sequence, reader.chain_hash or reader.head_hash, reader.head_hash)
    return SegmentEventStore(log, lock, reader.header, end, Durability.OS, segment_bytes, 50.0, None)


def compress_closed(log: Path) -> None:
    """Compress all segments of a log but the last, as its writer does."""
    for segment in segment_paths(log)[:-1]:
        if not is_compressed(segment):
            compress_segment(segment, replacing=contextlib.nullcontext())


def compressed_copy(log: Path, directory: Path) -> Path:
    """Copy a log into a folder that is not there yet, and compress its closed segments."""
    shutil.copytree(log, directory)
    compress_closed(directory)
    return directory


def is_compressed(segment: Path) -> bool:
    """Whether a segment has its compressed form."""
    with segment.open("rb") as file:
        return find_blocks(file.fileno(), segment.stat().st_size) is not None


@attrs.frozen
class StoredBlock:
    """One block of a compressed segment, taken from the file without any of the code that is tested."""

    offset: int
    """In the segment."""
    num_bytes: int
    """That it states to expand to."""
    at: int
    """In the file."""
    end_at: int
    """Where it ends in the file."""

    @property
    def end(self) -> int:
        """Where it ends in the segment."""
        return self.offset + self.num_bytes

    def without(self, segment: bytes) -> tuple[bytes, bytes]:
        """What stands before it and behind it in the file."""
        return segment[: self.at], segment[self.end_at :]


def blocks_of(segment: Path) -> list[StoredBlock]:
    """The blocks of a compressed segment, which is intact."""
    data, at, found = segment.read_bytes(), read_header(segment).num_bytes, []
    while at < len(data):
        offset, num_bytes, num_stream = struct.unpack_from("<QII", data, at + 8)
        found.append(StoredBlock(offset, num_bytes, at, at + BLOCK_HEADER_BYTES + num_stream))
        at = found[-1].end_at
    return found


def forged_block(offset: int, num_bytes: int, stream: bytes) -> bytes:
    """A block with checksums that fit, whatever it states."""
    fields = struct.pack("<QIII", offset, num_bytes, len(stream), crc32c(stream))
    return b"\xc1KVZ" + struct.pack("<I", crc32c(fields)) + fields + stream


@attrs.define
class Segment:
    """One file."""

    name: str
    header: bytes
    frames: list[bytes]

    def offset_of(self, frame: int) -> int:
        """Where a frame begins in the file."""
        return len(self.header) + sum(map(len, self.frames[:frame]))


@attrs.define
class Stored:
    """The files of a log, and the frames that its writer wrote."""

    segments: list[Segment]
    written: list[Frame]

    @classmethod
    def write(cls, directory: Path, payloads: list[bytes], num_events: int, segment_bytes: int) -> Stored:
        """Write a log and take it apart."""
        store = SegmentEventStore.create(directory, {"block_size": 16}, segment_bytes=segment_bytes)
        for payload in payloads:
            store.append(payload, num_events)
        store.close()
        segments = []
        for path in sorted(directory.glob("*.kvlog")):
            data, offset = path.read_bytes(), read_header(path).num_bytes
            segment = Segment(path.name, data[:offset], [])
            for frame in LogReader(path):
                segment.frames.append(data[offset : offset + frame_bytes(frame)])
                offset += frame_bytes(frame)
            assert offset == len(data)
            segments.append(segment)
        return cls(segments, list(LogReader(directory)))

    def copy(self) -> Stored:
        """One that can be damaged."""
        return Stored([Segment(each.name, each.header, list(each.frames)) for each in self.segments], self.written)

    def places(self) -> list[Place]:
        """Where each frame stands, in order."""
        return [(segment, frame) for segment, each in enumerate(self.segments) for frame in range(len(each.frames))]

    def gaps(self) -> list[Place]:
        """Where a frame can be put in: before each, and behind each segment's last."""
        return [(segment, frame) for segment, each in enumerate(self.segments) for frame in range(len(each.frames) + 1)]

    def frame(self, place: Place) -> Frame:
        """The frame that was written there."""
        return self.written[self.places().index(place)]

    def sequence_at(self, gap: Place) -> int:
        """The sequence number that comes there."""
        number = sum(len(each.frames) for each in self.segments[: gap[0]]) + gap[1]
        return self.written[number].first_sequence if number < len(self.written) else self.written[-1].next_sequence

    def is_end(self, gap: Place) -> bool:
        """Whether that is the end of the log."""
        return gap == (len(self.segments) - 1, len(self.segments[-1].frames))

    def write_to(self, directory: Path) -> None:
        """Put the files into a new directory."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        for segment in self.segments:
            (directory / segment.name).write_bytes(segment.header + b"".join(segment.frames))
