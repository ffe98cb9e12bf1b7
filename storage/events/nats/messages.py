"""One message of a stream: a segment's header block or a frame. This module must not know the network.

A message has the same bytes as the file. A log's messages, in order, therefore make up its uncompressed segment files.
The headers tell a shipper where it must continue, and are of use to people who work with other tools.

============================ ==========================================================================
header                       meaning
============================ ==========================================================================
``Kvledger-Segment``         file name of the segment
``Kvledger-Offset``          offset of the bytes in the segment; 0 is the header block
``Kvledger-Sequence``        first sequence number in the message
``Kvledger-Retired``         if segments are missing before this message: their retirement (JSON)
``Nats-Msg-Id``              the chain hash in hex. It covers the log's id and all frames before, so two
                             messages have the same id only if all bytes before them are the same
============================ ==========================================================================
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import attrs

from kvledger.storage.events.frames import Frame, parse_frame
from kvledger.storage.events.segment_file import decode_header
from kvledger.storage.events.store import LogDamaged

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "EXPECTED_LAST_ID",
    "EXPECTED_SUBJECT_SEQUENCE",
    "RETIRED",
    "SUBJECT_PREFIX",
    "Record",
    "label_of",
    "message_headers",
    "num_message_bytes",
    "record_of_frame",
    "record_of_message",
    "subject_of",
]

SUBJECT_PREFIX: Final = "kvledger.log"
RETIRED: Final = "Kvledger-Retired"
EXPECTED_SUBJECT_SEQUENCE: Final = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_LAST_ID: Final = "Nats-Expected-Last-Msg-Id"

_MESSAGE_ID: Final = "Nats-Msg-Id"
_SEGMENT: Final = "Kvledger-Segment"
_OFFSET: Final = "Kvledger-Offset"
_SEQUENCE: Final = "Kvledger-Sequence"
_NO_LABEL_LETTERS: Final = re.compile(r"[^A-Za-z0-9_-]+")
_SEGMENT_NAME: Final = re.compile(r"[0-9]{20}\.kvlog")
_OFFSET_TEXT: Final = re.compile(r"[0-9]{1,20}")


@attrs.frozen
class Record:
    """The bytes of one message: a header block or a frame, which begins at `offset` of `segment`.

    `chain_hash` (16 bytes) is the log's chain hash after these bytes. For a header block, `next_sequence` equals
    `first_sequence`.
    """

    segment: str
    offset: int
    data: bytes = attrs.field(repr=False)
    first_sequence: int
    next_sequence: int
    chain_hash: bytes
    retired: str = ""
    """The retirement, as JSON, of segments that are missing before this header block. Empty: no segments are
    missing, or their retirement is unknown."""

    @property
    def end(self) -> int:
        """Offset in the segment after the last byte."""
        return self.offset + len(self.data)

    @property
    def message_id(self) -> str:
        """Message id, by which the stream recognises a message that is sent twice."""
        return self.chain_hash.hex()

    @property
    def is_header(self) -> bool:
        """Whether this is a header block and not a frame."""
        return self.offset == 0

    def __str__(self) -> str:
        what = "the header block" if self.is_header else f"the frame of events {self.first_sequence}…"
        return f"{what} at byte {self.offset} of {self.segment}"


def record_of_frame(segment: str, offset: int, data: bytes, frame: Frame) -> Record:
    """Return the record of `frame`. `data` is the whole encoded frame, with its header."""
    return Record(segment, offset, data, frame.first_sequence, frame.next_sequence, frame.chain_hash)


def label_of(name: str) -> str:
    """Return `name` as one token of a NATS subject. Characters that are not allowed in a token become ``_``."""
    return _NO_LABEL_LETTERS.sub("_", name).strip("_") or "unnamed"


def subject_of(label: str, log_id: str) -> str:
    """Return the NATS subject of a log's messages.

    The subject contains the host's label, so a server can allow each host to publish only the host's own logs.
    """
    return f"{SUBJECT_PREFIX}.{label}.{log_id}"


def message_headers(record: Record) -> dict[str, str]:
    """Return a message's headers, except those that depend on the state of the stream."""
    headers = {
        _MESSAGE_ID: record.message_id,
        _SEGMENT: record.segment,
        _OFFSET: str(record.offset),
        _SEQUENCE: str(record.first_sequence),
    }
    return headers | {RETIRED: record.retired} if record.retired else headers


def num_message_bytes(headers: Mapping[str, str], data: bytes) -> int:
    """Return the size of a message in bytes, as the server counts it for the limit `max_payload`."""
    lines = ("NATS/1.0", *(f"{name}: {value}" for name, value in headers.items()), "")
    return sum(len(line) + len("\r\n") for line in lines) + len(data)


def record_of_message(headers: Mapping[str, str] | None, data: bytes) -> Record | str:
    """Return the record in a message, or why the message cannot be from a shipper. Raises `LogTooNew`."""
    segment = (headers or {}).get(_SEGMENT, "")
    offset = (headers or {}).get(_OFFSET, "")
    if not _SEGMENT_NAME.fullmatch(segment) or not _OFFSET_TEXT.fullmatch(offset):
        return f"its headers do not name a place in a log ({_SEGMENT}: {segment!r}, {_OFFSET}: {offset!r})"
    if int(offset) == 0:
        try:
            header = decode_header(data, segment)
        except LogDamaged as error:
            return str(error)
        return Record(segment, 0, data, header.first_sequence, header.first_sequence, header.chain_hash)
    frame = parse_frame(data, 0)
    if not isinstance(frame, Frame):
        return f"it contains no intact frame: {frame}"
    return record_of_frame(segment, int(offset), data, frame)
