"""The compressed form of a closed segment. This module must not know how frames are read from blocks.

The file keeps its name and its header block. In this module, a *block* is a compressed part of the segment. It has
whole frames. The blocks follow the header block without space between them. The last block is empty and marks the end
of the segment. Offsets in a segment count uncompressed bytes, so an offset from before the compression stays valid. A
block is little-endian:

====== ===== ======================================================================================
offset bytes field
====== ===== ======================================================================================
0      4     marker ``C1 4B 56 5A``, compared exactly; a reader searches for it after damaged bytes
4      4     CRC-32C of the next 20 bytes
8      8     offset of the block's first byte in the segment
16     4     number of bytes that the block expands to
20     4     number of bytes of the zlib stream
24     4     CRC-32C of the zlib stream
28     ...   zlib stream; no bytes in the empty block
====== ===== ======================================================================================

A log may come from an untrusted source. A block that states a larger size than `MAX_BLOCK_BYTES` is therefore refused.
No block is expanded beyond the size that it states.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from itertools import takewhile
from typing import TYPE_CHECKING, Final

import msgspec
from google_crc32c import value as crc32c

from kvledger.storage.events.files import is_regular_file, num_bytes_of, open_for_reading, sync_directory, write_file
from kvledger.storage.events.frames import FRAME_MARKER, Frame, declared_frame, frame_bytes, parse_frame
from kvledger.storage.events.segment_file import MAX_HEADER_BYTES, UNFINISHED_SUFFIX, decode_header
from kvledger.storage.events.store import LogDamaged, LogError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

__all__ = ["BLOCK_BYTES", "MAX_BLOCK_BYTES", "SegmentBlocks", "compress_segment", "encode_block", "find_blocks"]

BLOCK_BYTES: Final = 256 << 10
"""Maximum bytes of frames in one block, unless a single frame is larger."""
MAX_BLOCK_BYTES: Final = 16 << 20
"""Maximum bytes that a block may state. A segment with a larger frame is not compressed."""
_MAX_OFFSET: Final = 1 << 40
_MARKER: Final = b"\xc1KVZ"
_HEADER: Final = struct.Struct("<4sIQIII")
_CRC_COVERS_FROM: Final = 8
_WINDOW_BYTES: Final = 1 << 20
_FEW_BYTES: Final = 32 << 10
"""Bytes that are enough to read the header block of most segments."""
_LEVEL: Final = 1


class _Piece(msgspec.Struct, frozen=True, gc=False):
    """The bytes `start` to `end - 1` of a segment: one compressed block, or bytes that no intact block covers."""

    start: int
    end: int
    at: int = 0
    """Offset in the file of the block's zlib stream."""
    num_stored: int = 0
    """Bytes of the zlib stream."""
    crc: int = 0
    """CRC-32C of the zlib stream."""
    trouble: str = ""
    """Why no intact block covers these bytes. Empty: these bytes are an intact block."""


class SegmentBlocks:
    """The compressed blocks of a segment file. One expanded block stays in memory. `num_bytes` is the expanded size."""

    def __init__(self, descriptor: int, first_at: int, num_stored: int) -> None:
        """Read all block headers of a file of `num_stored` bytes. The first header is at byte `first_at`."""
        self._descriptor = descriptor
        self._first_at = first_at
        self._num_stored = num_stored
        first = _next_block(descriptor, first_at)
        self._header_end = first_at if first is None else min(first_at, first.start)
        self.num_bytes: Final = max((piece.end for piece in self._pieces()), default=self._header_end)
        self._following = self._pieces()
        self._piece = _Piece(0, self._header_end)
        self._expanded: bytes | str = ""
        """The uncompressed bytes of `_piece`, or why they cannot be read."""

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return up to `num_bytes` bytes from `offset` on, at most to the end of the block that covers `offset`.

        Empty if this block is damaged.
        """
        if offset < self._header_end:
            return os.pread(self._descriptor, min(num_bytes, self._header_end - offset), offset)
        self._seek(offset)
        start = offset - self._piece.start
        return self._expanded[start : start + num_bytes] if isinstance(self._expanded, bytes) else b""

    def trouble_at(self, offset: int) -> str:
        """Return why no intact block covers `offset`.

        Empty if `offset` is in an intact block, in the header block, or after the last block.
        """
        if not self._header_end <= offset < self.num_bytes:
            return ""
        self._seek(offset)
        return self._expanded if isinstance(self._expanded, str) else ""

    def end_at(self, offset: int) -> int:
        """Return the offset at which the block, the header block or the damaged part that covers `offset` ends."""
        if offset < self._header_end:
            return self._header_end
        self._seek(offset)
        return max(self._piece.end, offset)

    def _seek(self, offset: int) -> None:
        if offset < self._piece.start:
            self._following, self._piece = self._pieces(), _Piece(0, self._header_end)
        found = self._piece
        while found.end <= offset < self.num_bytes:
            changed = _Piece(found.end, self.num_bytes, trouble="the file was changed while it was read")
            found = next(self._following, changed)
        if found is not self._piece:
            self._piece, self._expanded = found, found.trouble or self._expand(found)

    def _pieces(self) -> Iterator[_Piece]:
        at, end = self._first_at, self._header_end
        while (block := _next_block(self._descriptor, at, end)) is not None:
            if block.start > end:
                stands = _decode_block(self._descriptor, at)
                trouble = stands if isinstance(stands, str) else "there is a block, but blocks before it are missing"
                yield _Piece(end, block.start, trouble=f"at byte {at} of the file, {trouble}")
            at, end = block.at + block.num_stored, block.end
            if block.start == end:
                if at == self._num_stored:
                    return
                break
            yield block
        yield _Piece(end, end + 1, trouble=f"the block that ends the segment is missing at byte {at} of the file")

    def _expand(self, block: _Piece) -> bytes | str:
        where = f"the block at byte {block.at - _HEADER.size} of the file"
        stored = os.pread(self._descriptor, block.num_stored, block.at)
        if crc32c(stored) != block.crc:
            return f"the CRC-32C of {where} does not match"
        num_bytes, expander = block.end - block.start, zlib.decompressobj()
        try:
            data = expander.decompress(stored, num_bytes + 1)
        except zlib.error as error:
            return f"{where} cannot be expanded: {error}"
        if len(data) > num_bytes:
            return f"{where} expands beyond the {num_bytes} bytes that it states; the rest was not expanded"
        if len(data) < num_bytes or not expander.eof or expander.unused_data:
            return f"{where} does not expand to the {num_bytes} bytes that it states"
        return data


def find_blocks(descriptor: int, num_stored: int) -> SegmentBlocks | None:
    """Return the compressed blocks of a segment file of `num_stored` bytes. None: the file is not compressed."""
    at = 0
    for num_read in (_FEW_BYTES, MAX_HEADER_BYTES):
        with contextlib.suppress(LogError):
            at = decode_header(os.pread(descriptor, num_read, 0), "", any_copy=True).num_bytes
            break
    begins = os.pread(descriptor, len(_MARKER), at)
    if begins != _MARKER:
        if begins.startswith(FRAME_MARKER) or not begins:
            return None
        # Damaged: if an intact block follows, the file is compressed.
        block = _next_block(descriptor, 0)
        if block is None:
            return None
        at = min(at or block.at, block.at - _HEADER.size)  # 0: no copy of the header is intact
    return SegmentBlocks(descriptor, at, num_stored)


def compress_segment(
    segment: Path, *, replacing: AbstractContextManager[object], goes_on: Callable[[], bool] = lambda: True
) -> None:
    """Replace a closed segment by its compressed form, in one step and synced to disk.

    The segment stays uncompressed if the compressed form is not smaller.

    Args:
        segment: path of the segment. Its writer must have finished with it.
        replacing: context manager that is entered while the file is replaced. A segment that was deleted before the
            replacement stays deleted.
        goes_on: called for each block. If it returns False, compression stops and the segment is unchanged.

    Raises:
        LogDamaged: the segment has bytes that are not an intact frame, or a frame that is too large for a block. The
            segment is unchanged.
        OSError: a file cannot be read or written. The segment is unchanged, except if only the sync of the directory
            failed.
    """
    unfinished = segment.with_suffix(UNFINISHED_SUFFIX)
    status = segment.lstat()
    try:
        write_file(unfinished, takewhile(lambda _: goes_on(), _compressed(segment)), durable=True)
        # Retention goes by the time of the last write of frames.
        os.utime(unfinished, ns=(status.st_atime_ns, status.st_mtime_ns))
        with replacing:
            if goes_on() and is_regular_file(segment) and num_bytes_of(unfinished) < status.st_size:
                unfinished.rename(segment)
                sync_directory(segment.parent)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def encode_block(offset: int, data: bytes) -> bytes:
    """Return the compressed block for `data`, which are the bytes of a segment from `offset` on."""
    # One call per block: zlib releases the interpreter lock meanwhile.
    stored = zlib.compress(data, _LEVEL) if data else b""
    fields = _HEADER.pack(_MARKER, 0, offset, len(data), len(stored), crc32c(stored))[_CRC_COVERS_FROM:]
    return _MARKER + struct.pack("<I", crc32c(fields)) + fields + stored


def _compressed(segment: Path) -> Iterator[bytes]:
    descriptor = open_for_reading(segment)
    try:
        offset = decode_header(os.pread(descriptor, MAX_HEADER_BYTES, 0), segment.name).num_bytes
        yield os.pread(descriptor, offset, 0)
        while data := os.pread(descriptor, BLOCK_BYTES, offset):
            end = _end_of_frames(data)
            if end == 0:
                num_bytes, _ = declared_frame(data, 0) or (0, 0)
                data = os.pread(descriptor, num_bytes, offset) if num_bytes <= MAX_BLOCK_BYTES else b""
                end = _end_of_frames(data)
            if end == 0:
                msg = f"{segment.name}: no intact frame that fits into a block begins at byte {offset}; not compressed"
                raise LogDamaged(msg)
            yield encode_block(offset, data[:end])
            offset += end
        yield encode_block(offset, b"")
    finally:
        os.close(descriptor)


def _end_of_frames(data: bytes) -> int:
    """Return how many bytes the intact frames at the beginning of `data` have."""
    end = 0
    while isinstance(frame := parse_frame(data, end), Frame):
        end += frame_bytes(frame)
    return end


def _next_block(descriptor: int, at: int, minimum_offset: int = 0) -> _Piece | None:
    """Return the first intact block at or after byte `at` of the file; None: there is none.

    Blocks that begin before `minimum_offset` in the uncompressed segment are skipped.
    """
    block = _decode_block(descriptor, at)
    if isinstance(block, _Piece) and block.start >= minimum_offset:
        return block
    for found in _markers(descriptor, at + 1):
        block = _decode_block(descriptor, found)
        if isinstance(block, _Piece) and block.start >= minimum_offset:
            return block
    return None


def _markers(descriptor: int, at: int) -> Iterator[int]:
    """Yield the offsets in the file at which a block marker is found, from `at` on."""
    while window := os.pread(descriptor, _WINDOW_BYTES, at):
        found = window.find(_MARKER)
        while found >= 0:
            yield at + found
            found = window.find(_MARKER, found + 1)
        if len(window) < _WINDOW_BYTES:
            return
        at += len(window) - len(_MARKER) + 1


def _decode_block(descriptor: int, at: int) -> _Piece | str:
    """Return the block at byte `at` of the file, or why no intact block begins there.

    The reason completes a sentence that begins with "at byte {at} of the file".
    """
    data = os.pread(descriptor, _HEADER.size, at)
    if len(data) < _HEADER.size:
        return f"there are {len(data)} bytes, too few for a block header"
    marker, header_crc, offset, num_bytes, num_stored, crc = _HEADER.unpack(data)
    if marker != _MARKER or header_crc != crc32c(data[_CRC_COVERS_FROM:]):
        return "there is no intact block header"
    if num_bytes > MAX_BLOCK_BYTES or offset > _MAX_OFFSET:
        return f"there is a block that states {num_bytes} bytes at offset {offset}, over the limit; not expanded"
    if num_stored > num_bytes + (num_bytes >> 9) + 64:  # more than zlib makes of so many
        return (
            f"there is a block that states {num_stored} compressed bytes for {num_bytes} uncompressed bytes, more "
            "than compression can make of them; not expanded"
        )
    return _Piece(offset, offset + num_bytes, at + _HEADER.size, num_stored, crc)
