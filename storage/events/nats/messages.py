"""One message of a stream: a segment's header block or a frame, as it stands in the file. Knows bytes, no network.

A log's messages, one behind the other, are its segment files byte for byte. What the headers say is a convenience for
whoever looks at the stream with other tools, and tells a shipper where it was; what counts is the bytes.

============================ ==========================================================================
header                       what
============================ ==========================================================================
``Kvledger-Segment``         file name of the segment
``Kvledger-Offset``          where the bytes begin in it; 0 is the header block
``Kvledger-Sequence``        first sequence number in the message
``Kvledger-Retired``         behind a gap: the record of the segments that were retired before they
                             were shipped
``Nats-Msg-Id``              the chain hash in hex. It covers the log's identity and everything before,
                             so equal ids mean equal histories, and a fork is never taken for a repetition
============================ ==========================================================================
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import attrs

from kvledger.storage.events.errors import LogDamaged
from kvledger.storage.events.frames import Frame, parse_frame
from kvledger.storage.events.segment_file import decode_header

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "MESSAGE_ID",
    "OFFSET",
    "RETIRED",
    "SEGMENT",
    "SEQUENCE",
    "SUBJECT_PREFIX",
    "Piece",
    "label_of",
    "message_headers",
    "num_header_bytes",
    "piece_of_message",
    "subject_of",
]

SUBJECT_PREFIX: Final = "kvledger.log"
SEGMENT: Final = "Kvledger-Segment"
OFFSET: Final = "Kvledger-Offset"
SEQUENCE: Final = "Kvledger-Sequence"
RETIRED: Final = "Kvledger-Retired"
MESSAGE_ID: Final = "Nats-Msg-Id"

_NO_LABEL_LETTERS = re.compile(r"[^A-Za-z0-9_-]+")
_FIRST_HEADER_LINE = len("NATS/1.0\r\n")
_SEGMENT_NAME = re.compile(r"\d{20}\.kvlog")


@attrs.frozen
class Piece:
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
    """With a header block behind a gap: the record of what was retired there."""

    @property
    def end(self) -> int:
        """The offset behind the last byte."""
        return self.offset + len(self.data)

    @property
    def message_id(self) -> str:
        """What the stream knows repetitions by."""
        return self.chain_hash.hex()

    @property
    def is_header(self) -> bool:
        """Whether this is a segment's header block and no frame."""
        return self.offset == 0

    def __str__(self) -> str:
        what = "the header block" if self.is_header else f"the frame of events {self.first_sequence}…"
        return f"{what} at byte {self.offset} of {self.segment}"


def label_of(name: str) -> str:
    """Return `name` as one token of a subject: what a subject may not hold becomes ``_``."""
    return _NO_LABEL_LETTERS.sub("_", name).strip("_") or "unnamed"


def subject_of(label: str, log_id: str) -> str:
    """Return the subject of a log. The label lets a server allow an engine's host its own logs only."""
    return f"{SUBJECT_PREFIX}.{label}.{log_id}"


def message_headers(piece: Piece) -> dict[str, str]:
    """Return the headers that a message has whatever the stream holds."""
    headers = {
        MESSAGE_ID: piece.message_id,
        SEGMENT: piece.segment,
        OFFSET: str(piece.offset),
        SEQUENCE: str(piece.first_sequence),
    }
    return headers | {RETIRED: piece.retired} if piece.retired else headers


def num_header_bytes(headers: Mapping[str, str]) -> int:
    """Return what the headers take on the wire; they count towards the server's `max_payload`."""
    return _FIRST_HEADER_LINE + sum(len(f"{name}: {value}\r\n") for name, value in headers.items()) + len("\r\n")


def piece_of_message(headers: Mapping[str, str] | None, data: bytes) -> Piece | str:
    """Return what a stored message carries, or the reason why it is none of ours."""
    segment = (headers or {}).get(SEGMENT, "")
    offset = (headers or {}).get(OFFSET, "")
    if not _SEGMENT_NAME.fullmatch(segment) or not offset.isdecimal():
        return f"its headers name no place in a log ({SEGMENT}: {segment!r}, {OFFSET}: {offset!r})"
    if int(offset) == 0:
        try:
            header = decode_header(data, segment)
        except LogDamaged as error:
            return str(error)
        return Piece(segment, 0, data, header.first_sequence, header.first_sequence, header.chain_hash)
    frame = parse_frame(data, 0)
    if not isinstance(frame, Frame):
        return f"it holds no intact frame: {frame}"
    return Piece(segment, int(offset), data, frame.first_sequence, frame.next_sequence, frame.chain_hash)
