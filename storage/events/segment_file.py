"""The name and the header block of a segment file. This module must not know frames.

The file name is ``{first_sequence:020d}.kvlog``. The header block consists of two equal copies, so that a segment can
be read if one copy is damaged. Each copy is little-endian:

====== ===== ======================================================================================
offset bytes field
====== ===== ======================================================================================
0      8     magic ``KVLEDGER``
8      2     format version
10     4     body length in bytes
14     4     CRC-32C of bytes 0..13 and the body
18     ...   body: a msgpack map of `log_id`, `first_sequence`, `previous_head_hash`, `header`, `segment_number`
====== ===== ======================================================================================

The first 18 bytes have the same fields in every format version, so an old kvledger can report a newer format version.
The chain of hashes in a segment starts with the BLAKE2b-128 of one copy. Each copy contains the chain hash at the end
of the segment before, so the chain covers the whole log.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import attrs
import msgspec
from google_crc32c import extend as extend_crc32c
from google_crc32c import value as crc32c

from kvledger.lifecycle.untrusted import MAX_DEPTH, Undecodable, from_msgpack, is_too_deep
from kvledger.storage.events.files import open_for_reading, sync_directory, write_file
from kvledger.storage.events.frames import CHAIN_HASH_BYTES
from kvledger.storage.events.store import LogDamaged, LogError, LogTooNew

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    "FORMAT_VERSION",
    "MAX_HEADER_BYTES",
    "NO_PREVIOUS_HASH",
    "ONE_COPY_DAMAGED",
    "SEGMENT_SUFFIX",
    "SNAPSHOT_SUFFIX",
    "UNFINISHED_SUFFIX",
    "SegmentHeader",
    "decode_header",
    "encode_header",
    "first_sequence_of",
    "read_header",
    "segment_name",
    "segment_paths",
    "write_segment",
]

FORMAT_VERSION = 1
MAX_HEADER_BYTES = 1 << 20
NO_PREVIOUS_HASH = bytes(CHAIN_HASH_BYTES)
ONE_COPY_DAMAGED = "one of the segment header's two copies is damaged; the other copy is intact"
UNFINISHED_SUFFIX = ".unfinished"
SEGMENT_SUFFIX = ".kvlog"
SNAPSHOT_SUFFIX = ".snapshot"
"""Suffix of a segment's snapshot."""

_MAGIC = b"KVLEDGER"
_PREFIX = struct.Struct("<8sHII")
_PREFIX_WITHOUT_CRC = struct.Struct("<8sHI")
_NAME = re.compile(r"(\d{20})\.kvlog")


@attrs.frozen
class _Body:
    log_id: str
    first_sequence: int
    previous_head_hash: bytes
    header: dict[str, Any]
    segment_number: int | None = None


_encoder = msgspec.msgpack.Encoder(order="deterministic")


@attrs.frozen
class SegmentHeader:
    """A segment's header. `header` is the mapping that the log's creator has given."""

    log_id: str
    first_sequence: int
    previous_head_hash: bytes
    header: dict[str, object]
    num_bytes: int
    """Size of both copies in bytes. The first frame begins at this offset."""
    chain_hash: bytes
    segment_number: int | None = None
    """1 for a log's first segment, 2 for the next, and so on; None: the header has no number."""
    damaged_at: int | None = None
    """Offset in the file of a damaged copy of the header; None: both copies are intact."""


def encode_header(
    log_id: str,
    first_sequence: int,
    previous_head_hash: bytes,
    header: Mapping[str, object],
    segment_number: int | None = None,
) -> bytes:
    """Return a header block. Raises `LogError` if the mapping `header` cannot be stored."""
    if "log_id" in header:
        msg = "the header mapping has a key 'log_id', which the log writes itself; use another key"
        raise LogError(msg)
    if is_too_deep(header):
        msg = f"the header mapping is nested more than {MAX_DEPTH} levels deep, which readers refuse; make it flatter"
        raise LogError(msg)
    try:
        fields = attrs.asdict(
            _Body(log_id, first_sequence, previous_head_hash, dict(header), segment_number), recurse=False
        )
        body = _encoder.encode({name: value for name, value in fields.items() if value is not None})
    except (TypeError, ValueError, OverflowError) as error:
        msg = f"the header mapping cannot be stored: {error}; give it JSON values only"
        raise LogError(msg) from error
    if 2 * (_PREFIX.size + len(body)) > MAX_HEADER_BYTES:
        limit = MAX_HEADER_BYTES // 2
        msg = f"the header mapping takes {len(body)} bytes, over the limit of {limit} bytes for one copy; shorten it"
        raise LogError(msg)
    prefix = _PREFIX_WITHOUT_CRC.pack(_MAGIC, FORMAT_VERSION, len(body))
    return 2 * (prefix + struct.pack("<I", crc32c(prefix + body)) + body)


def decode_header(data: bytes, name: str, *, any_copy: bool = False) -> SegmentHeader:
    """Decode the header block at the start of `data`. `name` is the file's name for messages.

    Both copies of the header must be intact. With `any_copy`, one intact copy is enough.

    Raises:
        LogDamaged: not enough copies are intact, or `data` ends within the block.
        LogTooNew: an intact copy has a newer format version.
    """
    problem, at = "", 0
    while at >= 0:
        found = _decode_copy(data, at, name)
        if isinstance(found, SegmentHeader):
            size = found.num_bytes // 2
            break
        problem = problem or found
        at = data.find(_MAGIC, at + 1)
    else:
        raise LogDamaged(problem)
    if len(data) < found.num_bytes:
        msg = f"{name}: the file ends {found.num_bytes - len(data)} bytes before the end of its header block"
        raise LogDamaged(msg)
    if data[:size] == data[size : found.num_bytes]:
        return found
    if not any_copy:
        msg = f"{name}: {ONE_COPY_DAMAGED}"
        raise LogDamaged(msg)
    return attrs.evolve(found, damaged_at=0 if at else size)


def _decode_copy(data: bytes, at: int, name: str) -> SegmentHeader | str:
    """Return the header from the copy at offset `at`, or why no intact copy begins there.

    The first copy is at offset 0, the second directly after the first.
    """
    if len(data) - at < _PREFIX.size:
        return f"{name}: {len(data) - at} bytes are too few for a segment header"
    magic, version, num_body_bytes, crc = _PREFIX.unpack_from(data, at)
    if magic != _MAGIC:
        first = _MAGIC.decode()
        return f"{name}: does not begin with {first}, so it is no log segment, or its first bytes are damaged"
    size = _PREFIX.size + num_body_bytes
    if at not in {0, size}:
        return f"{name}: the segment header is cut or its CRC-32C does not match"
    body = data[at + _PREFIX.size : at + size]
    covered = crc32c(data[at : at + _PREFIX_WITHOUT_CRC.size])
    if len(body) < num_body_bytes or extend_crc32c(covered, body) != crc:
        return f"{name}: the segment header is cut or its CRC-32C does not match"
    if version > FORMAT_VERSION:
        msg = (
            f"{name}: written in log format {version}, but this version of kvledger reads up to {FORMAT_VERSION}; "
            f"read it with a kvledger that knows format {version}"
        )
        raise LogTooNew(msg)
    try:
        fields: _Body = from_msgpack(body, _Body)
    except Undecodable as error:
        return f"{name}: the segment header has unexpected contents: {error}"
    chain_hash = blake2b(data[at : at + size], digest_size=CHAIN_HASH_BYTES).digest()
    return SegmentHeader(
        fields.log_id,
        fields.first_sequence,
        fields.previous_head_hash,
        fields.header,
        2 * size,
        chain_hash,
        fields.segment_number,
    )


def read_header(segment: Path, *, any_copy: bool = False) -> SegmentHeader:
    """Read the header block of a segment file. Raises the errors of `decode_header`, and `OSError`."""
    with os.fdopen(open_for_reading(segment), "rb") as file:
        return decode_header(file.read(MAX_HEADER_BYTES), segment.name, any_copy=any_copy)


def segment_name(first_sequence: int) -> str:
    """Return the file name of the segment that begins with `first_sequence`."""
    return f"{first_sequence:020d}{SEGMENT_SUFFIX}"


def first_sequence_of(segment: Path) -> int | None:
    """Return the sequence number in a segment's file name; None if the file is not named like a segment."""
    match = _NAME.fullmatch(segment.name)
    return int(match[1]) if match else None


def segment_paths(directory: Path) -> list[Path]:
    """Return the paths of the segments in `directory`, in the order of their events."""
    return sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name))


def write_segment(directory: Path, first_sequence: int, block: bytes, *, durable: bool) -> Path:
    """Create a segment that has only the header block `block`. The segment is created completely or not at all.

    Raises `OSError`. If only the sync of the directory failed, the segment exists nevertheless.
    """
    segment = directory / segment_name(first_sequence)
    unfinished = segment.with_suffix(UNFINISHED_SUFFIX)
    try:
        write_file(unfinished, block, durable=durable)
        unfinished.rename(segment)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(directory)
    return segment
