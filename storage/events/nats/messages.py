"""One message of a stream: a segment's header block or a frame, as it stands in the file. Knows bytes, no network.

A log's messages, one behind the other, are its segment files byte for byte. What the headers say is a convenience for
people who look at the stream with other tools, and the cursor of a shipper; what counts is the bytes.

============================ ==========================================================================
header                       what
============================ ==========================================================================
``Kvledger-Segment``         file name of the segment
``Kvledger-Offset``          where the bytes begin in it; 0 is the header block
``Kvledger-Sequence``        first sequence number in the message
``Kvledger-Retired``         behind a gap: the retirement (JSON) of the segments that were retired before
                             they were shipped
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
    """What one message carries: the bytes at `offset` of `segment`; the chain hash (16 bytes) is the one behind them.

    For a header block `next_sequence` is `first_sequence`.
    """

    segment: str
    offset: int
    data: bytes = attrs.field(repr=False)
    first_sequence: int
    next_sequence: int
    chain_hash: bytes
    retired: str = ""
    """With a header block behind a gap: the retirement of what is missing there."""

    @property
    def end(self) -> int:
        """The offset behind the last byte."""
        return self.offset + len(self.data)

    @property
    def message_id(self) -> str:
        """What the stream recognises a repeated message by."""
        return self.chain_hash.hex()

    @property
    def is_header(self) -> bool:
        """Whether this is a segment's header block and no frame."""
        return self.offset == 0

    def __str__(self) -> str:
        what = "the header block" if self.is_header else f"the frame of events {self.first_sequence}…"
        return f"{what} at byte {self.offset} of {self.segment}"


def record_of_frame(segment: str, offset: int, data: bytes, frame: Frame) -> Record:
    """Return the record of a frame; `data` is the whole of it."""
    return Record(segment, offset, data, frame.first_sequence, frame.next_sequence, frame.chain_hash)


def label_of(name: str) -> str:
    """Return `name` as one token of a subject: what a subject may not hold becomes ``_``."""
    return _NO_LABEL_LETTERS.sub("_", name).strip("_") or "unnamed"


def subject_of(label: str, log_id: str) -> str:
    """Return the subject of a log. The label lets a server allow an engine's host its own logs only."""
    return f"{SUBJECT_PREFIX}.{label}.{log_id}"


def message_headers(record: Record) -> dict[str, str]:
    """Return the headers that a message has whatever the stream holds."""
    headers = {
        _MESSAGE_ID: record.message_id,
        _SEGMENT: record.segment,
        _OFFSET: str(record.offset),
        _SEQUENCE: str(record.first_sequence),
    }
    return headers | {RETIRED: record.retired} if record.retired else headers


def num_message_bytes(headers: Mapping[str, str], data: bytes) -> int:
    """Return what counts towards the server's `max_payload`."""
    lines = ("NATS/1.0", *(f"{name}: {value}" for name, value in headers.items()), "")
    return sum(len(line) + len("\r\n") for line in lines) + len(data)


def record_of_message(headers: Mapping[str, str] | None, data: bytes) -> Record | str:
    """Return what a stored message carries, or the reason why it is none of ours."""
    segment = (headers or {}).get(_SEGMENT, "")
    offset = (headers or {}).get(_OFFSET, "")
    if not _SEGMENT_NAME.fullmatch(segment) or not _OFFSET_TEXT.fullmatch(offset):
        return f"its headers name no place in a log ({_SEGMENT}: {segment!r}, {_OFFSET}: {offset!r})"
    if int(offset) == 0:
        try:
            header = decode_header(data, segment)
        except LogDamaged as error:
            return str(error)
        return Record(segment, 0, data, header.first_sequence, header.first_sequence, header.chain_hash)
    frame = parse_frame(data, 0)
    if not isinstance(frame, Frame):
        return f"it holds no intact frame: {frame}"
    return record_of_frame(segment, int(offset), data, frame)
