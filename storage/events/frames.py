"""A frame: the unit that is written whole or not at all.

This module works on bytes. It must not know files, or what a payload means. A frame on disk is little-endian and has no
padding:

====== ===== ======================================================================================
offset bytes content
====== ===== ======================================================================================
0      2     marker ``F5 4B``, compared exactly; a reader searches for it after damaged bytes
2      4     CRC-32C of the rest of the frame: fields, chain hash, payload
6      4     field: payload length in bytes
10     1     field: kind (`FrameKind`)
11     8     field: first sequence number
19     4     field: number of events, at least 1
23     16    chain hash: BLAKE2b-128 of previous chain hash + fields + payload
39     ...   payload
====== ===== ======================================================================================

A reader checks every byte of a frame: the marker by comparison, the other bytes with the CRC.
"""

from __future__ import annotations

import enum
import struct
from hashlib import blake2b

import msgspec
from google_crc32c import value as crc32c

__all__ = [
    "CHAIN_HASH_BYTES",
    "CRC_COVERS_FROM",
    "FRAME_HEADER_BYTES",
    "FRAME_MARKER",
    "MAX_EVENTS",
    "MAX_PAYLOAD_BYTES",
    "MAX_SEQUENCE",
    "Frame",
    "FrameKind",
    "check_append",
    "declared_frame",
    "encode_frame",
    "follows",
    "frame_bytes",
    "next_chain_hash",
    "parse_frame",
]

CHAIN_HASH_BYTES = 16
MAX_PAYLOAD_BYTES = 1 << 30
MAX_EVENTS = (1 << 32) - 1
MAX_SEQUENCE = (1 << 64) - 1

FRAME_MARKER = b"\xf5K"
_FIELDS = struct.Struct("<IBQI")
_PREFIX = struct.Struct("<2sI")
_HEADER = struct.Struct("<2sIIBQI16s")
FRAME_HEADER_BYTES = _HEADER.size
CRC_COVERS_FROM = _PREFIX.size
"""Offset in a frame of the first byte that the CRC covers."""

_pack_fields = _FIELDS.pack
_pack_prefix = _PREFIX.pack
_unpack_header = _HEADER.unpack_from


class FrameKind(enum.IntEnum):
    """The kind of a frame's payload."""

    EVENTS = 0
    """Encoded events; the store does not decode them."""
    GAP = 1
    """Text in UTF-8: the reason why the frame's events could not be written."""


_KINDS = {int(kind): kind for kind in FrameKind}


class Frame(msgspec.Struct, frozen=True):
    """One stored frame. `chain_hash` (16 bytes) covers this frame and, through the previous hash, all frames before."""

    first_sequence: int
    num_events: int
    kind: FrameKind
    payload: bytes
    chain_hash: bytes

    @property
    def next_sequence(self) -> int:
        """Sequence number after the frame's last event."""
        return self.first_sequence + self.num_events


def check_append(num_events: int, num_payload_bytes: int) -> None:
    """Raise `ValueError` if one frame cannot hold this many events or payload bytes."""
    if not 0 < num_events <= MAX_EVENTS:
        msg = f"a frame holds 1 to {MAX_EVENTS} events, not {num_events}; append nothing when nothing happened"
        raise ValueError(msg)
    if num_payload_bytes > MAX_PAYLOAD_BYTES:
        msg = (
            f"a payload of {num_payload_bytes} bytes exceeds the limit of {MAX_PAYLOAD_BYTES} bytes per frame; "
            "append it in parts"
        )
        raise ValueError(msg)


def encode_frame(
    kind: int, first_sequence: int, num_events: int, payload: bytes, previous_hash: bytes
) -> tuple[bytes, bytes]:
    """Return the encoded frame and its chain hash. The caller has checked the sizes with `check_append`."""
    fields = _pack_fields(len(payload), kind, first_sequence, num_events)
    chain_hash = blake2b(previous_hash + fields + payload, digest_size=16).digest()
    covered = fields + chain_hash + payload
    return _pack_prefix(FRAME_MARKER, crc32c(covered)) + covered, chain_hash


def next_chain_hash(previous_hash: bytes, frame: Frame) -> bytes:
    """Compute the chain hash that `frame` must have if it follows `previous_hash`. Both hashes have 16 bytes."""
    fields = _pack_fields(len(frame.payload), frame.kind, frame.first_sequence, frame.num_events)
    return blake2b(previous_hash + fields + frame.payload, digest_size=CHAIN_HASH_BYTES).digest()


def follows(frame: Frame, sequence: int | None, chain_hash: bytes | None) -> bool:
    """Whether `frame` begins with event `sequence` and its chain hash continues `chain_hash` (16 bytes).

    If `sequence` or `chain_hash` is None, it is not checked.
    """
    if sequence is not None and frame.first_sequence != sequence:
        return False
    return chain_hash is None or next_chain_hash(chain_hash, frame) == frame.chain_hash


def frame_bytes(frame: Frame) -> int:
    """Return the number of bytes that `frame` takes in an uncompressed segment."""
    return FRAME_HEADER_BYTES + len(frame.payload)


def declared_frame(data: bytes, offset: int) -> tuple[int, int] | None:
    """Return the frame's size in bytes and its CRC, as the frame header at `offset` states them.

    None: there is no complete frame header at `offset`.
    """
    if len(data) - offset < FRAME_HEADER_BYTES:
        return None
    marker, crc, num_payload_bytes, *_ = _unpack_header(data, offset)
    return (FRAME_HEADER_BYTES + num_payload_bytes, crc) if marker == FRAME_MARKER else None


def parse_frame(data: bytes, offset: int) -> Frame | str:
    """Return the intact frame at `offset` of `data`, or the reason why there is no intact frame."""
    num_left = len(data) - offset
    if num_left < FRAME_HEADER_BYTES:
        return f"{num_left} bytes are too few for a frame header of {FRAME_HEADER_BYTES} bytes"
    marker, crc, num_payload_bytes, kind, first_sequence, num_events, chain_hash = _unpack_header(data, offset)
    if marker != FRAME_MARKER:
        return f"{marker.hex()} is not a frame marker"
    end = offset + FRAME_HEADER_BYTES + num_payload_bytes
    if end > len(data):
        return f"according to its header, the frame ends {end - len(data)} bytes after the end of the file"
    if crc32c(data[offset + _PREFIX.size : end]) != crc:
        return "the CRC-32C does not match"
    known_kind = _KINDS.get(kind)
    if known_kind is None or num_events == 0:
        return f"a frame of kind {kind} with {num_events} events, which no writer of this format writes"
    return Frame(first_sequence, num_events, known_kind, data[offset + FRAME_HEADER_BYTES : end], chain_hash)
