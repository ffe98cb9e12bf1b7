"""Reading from a known place in a log, without reading what stands before it.

For whoever noted a frame's segment and offset (an index) and wants it again. It must not judge a log: where a frame is
not intact, or does not go on from the one before, reading ends; `read_log` says what is wrong there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvledger.storage.events.errors import LogError
from kvledger.storage.events.frames import Frame, frame_bytes
from kvledger.storage.events.segment_bytes import SegmentBytes
from kvledger.storage.events.segment_file import read_header, segment_paths

__all__ = ["frames_from"]


def frames_from(path: Path, segment: str, offset: int) -> Iterator[tuple[Frame, str, int]]:
    """Yield the frames of the log at `path` from `offset` (bytes) of the segment named so, each with its place."""
    segments = segment_paths(path) if path.is_dir() else [path]
    expected: int | None = None
    for file in (file for file in segments if file.name >= segment):
        try:
            start = offset if file.name == segment else read_header(file, any_copy=True).num_bytes
        except (LogError, FileNotFoundError):
            return
        for frame, at in _frames_of(file, start):
            if expected not in {None, frame.first_sequence}:
                return
            yield frame, file.name, at
            expected = frame.next_sequence


def _frames_of(file: Path, offset: int) -> Iterator[tuple[Frame, int]]:
    with SegmentBytes(file) as data:
        while offset < data.num_bytes:
            frame = data.frame_at(offset)
            if not isinstance(frame, Frame):
                return
            yield frame, offset
            offset += frame_bytes(frame)
