"""One message of a stream: a segment's header block or a frame, as in the file. Knows bytes, no network.

A log's messages in order are its segment files, byte for byte, and only the bytes count. The headers are a shipper's
cursor, and help people who use other tools.

============================ ==========================================================================
header                       what
============================ ==========================================================================
``Kvledger-Segment``         file name of the segment
``Kvledger-Offset``          offset of the bytes in the segment; 0 is the header block
``Kvledger-Sequence``        first sequence number in the message
``Kvledger-Retired``         after a gap: the retirement (JSON) of the segments that are missing there
``Nats-Msg-Id``              the chain hash in hex. It covers the log's identity and everything before,
                             so equal ids mean equal histories, and a fork is never taken for a repetition
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
    """The bytes at `offset` of `segment`, in one message. `chain_hash` (16 bytes) is the chain hash up to their end.

    In a header block, `next_sequence` equals `first_sequence`.
    """

    segment: str
    offset: int
    data: bytes = attrs.field(repr=False)
    first_sequence: int
    next_sequence: int
    chain_hash: bytes
    retired: str = ""
    """In a header block after a gap: the retirement of the missing segments, as JSON."""

    @property
    def end(self) -> int:
        """Offset after the last byte."""
        return self.offset + len(self.data)

    @property
    def message_id(self) -> str:
        """Id by which the stream recognises repetitions."""
        return self.chain_hash.hex()

    @property
    def is_header(self) -> bool:
        """Whether this is a header block and not a frame."""
        return self.offset == 0

    def __str__(self) -> str:
        what = "the header block" if self.is_header else f"the frame of events {self.first_sequence}…"
        return f"{what} at byte {self.offset} of {self.segment}"


def record_of_frame(segment: str, offset: int, data: bytes, frame: Frame) -> Record:
    """Return the record of a frame; `data` is the whole frame."""
    return Record(segment, offset, data, frame.first_sequence, frame.next_sequence, frame.chain_hash)


def label_of(name: str) -> str:
    """Return `name` as one token of a subject: characters that a subject may not hold become ``_``."""
    return _NO_LABEL_LETTERS.sub("_", name).strip("_") or "unnamed"


def subject_of(label: str, log_id: str) -> str:
    """Return a log's subject. With the label, a server can allow an engine's host its own logs only."""
    return f"{SUBJECT_PREFIX}.{label}.{log_id}"


def message_headers(record: Record) -> dict[str, str]:
    """Return the headers that do not depend on the state of the stream."""
    headers = {
        _MESSAGE_ID: record.message_id,
        _SEGMENT: record.segment,
        _OFFSET: str(record.offset),
        _SEQUENCE: str(record.first_sequence),
    }
    return headers | {RETIRED: record.retired} if record.retired else headers


def num_message_bytes(headers: Mapping[str, str], data: bytes) -> int:
    """Return the bytes of a message as the server's `max_payload` counts them."""
    lines = ("NATS/1.0", *(f"{name}: {value}" for name, value in headers.items()), "")
    return sum(len(line) + len("\r\n") for line in lines) + len(data)


def record_of_message(headers: Mapping[str, str] | None, data: bytes) -> Record | str:
    """Return the record in a message, or why it is not a shipper's. Raises `LogTooNew`."""
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
