"""The frames of one segment file, compressed or not.

Offsets and sizes count uncompressed bytes. A frame that is cut off at the end of the file is ignored. No frame spans
two blocks of a compressed file. Only a part of the file is in memory at a time: at most 1 MiB, one block or one frame.

The file is not mapped into memory. A writer shortens the file to remove a half-written frame. This would kill a process
that has the file mapped.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, Self

from google_crc32c import extend as extend_crc32c

from kvledger.storage.events.compressed import find_blocks
from kvledger.storage.events.files import is_regular_file, open_for_reading
from kvledger.storage.events.frames import (
    CRC_COVERS_FROM,
    FRAME_HEADER_BYTES,
    FRAME_MARKER,
    MAX_SEQUENCE,
    Frame,
    declared_frame,
    follows,
    parse_frame,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

__all__ = ["SegmentBytes", "num_written_bytes"]

_WINDOW_BYTES: Final = 1 << 20
_TRIED_BYTES: Final = 64 << 20
_TRIED_BYTES_PER_BYTE: Final = 32


class SegmentBytes:
    """One segment file, open for reading. `num_bytes` is its uncompressed size when it was last checked."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises `OSError`."""
        self._descriptor = open_for_reading(path)
        num_stored = os.fstat(self._descriptor).st_size
        try:
            self._blocks = find_blocks(self._descriptor, num_stored)
        except BaseException:
            os.close(self._descriptor)
            raise
        """Blocks of a compressed segment; None: the segment is not compressed."""
        self.num_bytes = num_stored if self._blocks is None else self._blocks.num_bytes
        self._window = b""
        self._window_start = 0
        self._num_bytes_to_try = _TRIED_BYTES + _TRIED_BYTES_PER_BYTE * num_stored
        """Bytes of false frames that may still be checked. A hostile file may consist of false frames."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return up to `num_bytes` bytes from `offset` on, at most to the end of the file or compressed block."""
        num_bytes = max(0, min(num_bytes, self.num_bytes - offset))
        if self._blocks is not None:
            return self._blocks.read(offset, num_bytes)
        return os.pread(self._descriptor, num_bytes, offset)

    def block_trouble(self, offset: int) -> str:
        """Return why the compressed block at `offset` cannot be read.

        Empty if the block can be read, or if the segment is not compressed.
        """
        return "" if self._blocks is None else self._blocks.trouble_at(offset)

    def has_changed(self, offset: int) -> bool:
        """Read the file again. Return whether its size or its bytes at `offset` have changed.

        A compressed file never changes.
        """
        if self._blocks is not None:
            return False
        before = (self.num_bytes, self.read(offset, _WINDOW_BYTES))
        self.num_bytes = os.fstat(self._descriptor).st_size
        self._window = b""
        return before != (self.num_bytes, self.read(offset, _WINDOW_BYTES))

    def frame_at(self, offset: int) -> Frame | str:
        """Return the intact frame at `offset`, or the reason why there is no intact frame."""
        at = offset - self._window_start
        if not 0 <= at <= len(self._window) - FRAME_HEADER_BYTES:
            self._load(offset, _WINDOW_BYTES)
            at = 0
        found = parse_frame(self._window, at)
        if isinstance(found, Frame):
            return found
        declared = declared_frame(self._window, at)
        if declared is None:
            return found
        num_bytes, crc = declared
        if offset + num_bytes > self.num_bytes:
            return (
                f"according to its header, the frame ends {offset + num_bytes - self.num_bytes} bytes after the end of "
                "the file"
            )
        if at + num_bytes <= len(self._window):
            return found
        if num_bytes > _WINDOW_BYTES and self._crc_of(offset, num_bytes) != crc:
            return "the CRC-32C does not match"
        self._load(offset, num_bytes)
        return parse_frame(self._window, 0)

    def find_frame(
        self, start: int, minimum_sequence: int = 1, maximum_sequence: int | None = None
    ) -> tuple[int, Frame] | None:
        """Return the offset of the first intact frame at or after `start`, and the frame; None: not found.

        The frame's first sequence number is at least `minimum_sequence` and below `maximum_sequence`. The number is
        checked before the CRC, so bytes that only look like a marker cost little time. The search gives up if a file
        has very many false frames.
        """
        upper_bound = MAX_SEQUENCE if maximum_sequence is None else maximum_sequence
        offset = start
        while offset + FRAME_HEADER_BYTES <= self.num_bytes:
            at = offset - self._window_start
            if not 0 <= at <= len(self._window) - FRAME_HEADER_BYTES:
                self._load(offset, _WINDOW_BYTES)
                at = 0
            if len(self._window) < FRAME_HEADER_BYTES:
                if self._blocks is None:
                    return None  # the file was shortened meanwhile
                offset = self._blocks.end_at(offset)
                continue
            found = self._window.find(FRAME_MARKER, at)
            if found < 0:
                # A marker may begin with the last byte of the window.
                offset = self._window_start + len(self._window) - 1
                continue
            offset = self._window_start + found
            header = self.read(offset, FRAME_HEADER_BYTES)
            first_sequence = int.from_bytes(header[11:19], "little")
            plausible = minimum_sequence <= first_sequence < upper_bound
            if plausible:
                num_bytes = FRAME_HEADER_BYTES + int.from_bytes(header[6:10], "little")
                if offset + num_bytes <= self.num_bytes:
                    self._num_bytes_to_try -= num_bytes
                if self._num_bytes_to_try < 0:
                    return None
            frame = self.frame_at(offset) if plausible else ""
            if isinstance(frame, Frame):
                return offset, frame
            offset += 1
        return None

    def frames(
        self, offset: int, sequence: int | None = None, chain_hash: bytes | None = None
    ) -> Iterator[tuple[int, Frame]]:
        """Yield the frames from `offset` on, with their offsets. Stop at a frame that is not intact or does not follow.

        A frame follows if its sequence number and its chain hash continue the frame before. The first frame must begin
        with event `sequence` and continue `chain_hash` (16 bytes); None: not checked.
        """
        while offset < self.num_bytes:
            frame = self.frame_at(offset)
            if not isinstance(frame, Frame) or not follows(frame, sequence, chain_hash):
                return
            yield offset, frame
            offset += FRAME_HEADER_BYTES + len(frame.payload)
            sequence, chain_hash = frame.first_sequence + frame.num_events, frame.chain_hash

    def ends_with_whole_frame(self, offset: int) -> bool:
        """Whether, by its header, the frame at `offset` ends where the file ends, and the file does not end with zeros.

        Such a frame was written completely. An interrupted write leaves a shorter file, and a power cut leaves zeros.
        """
        declared = declared_frame(self.read(offset, FRAME_HEADER_BYTES), 0)
        if declared is None or offset + declared[0] != self.num_bytes:
            return False
        return any(self.read(max(offset + FRAME_HEADER_BYTES - 16, self.num_bytes - 16), 16))

    def _load(self, offset: int, num_bytes: int) -> None:
        self._window, self._window_start = self.read(offset, max(num_bytes, _WINDOW_BYTES)), offset

    def _crc_of(self, offset: int, num_bytes: int) -> int:
        crc, at, end = 0, offset + CRC_COVERS_FROM, offset + num_bytes
        while at < end:
            part = self.read(at, min(_WINDOW_BYTES, end - at))
            if not part:
                break
            crc, at = extend_crc32c(crc, part), at + len(part)
        return crc


def num_written_bytes(segment: Path) -> int:
    """Return a segment's size in bytes before compression; 0 if `segment` is no regular file. Raises `OSError`."""
    if not is_regular_file(segment):
        return 0
    with SegmentBytes(segment) as data:
        return data.num_bytes
