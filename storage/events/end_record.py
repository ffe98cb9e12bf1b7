"""The record of a log's end: a small file next to the segments that says how far the log got, and if it was closed.

`log.end` is written whole when the log is made, and from then on only overwritten in place, so that it can be written
on a disk that is full: how many events wait and cannot be written is known also after SIGKILL. It is rewritten when the
writer goes on in a new segment, when events cannot be written or could be again, and when the log is closed. It is
evidence about the segments and never needed to read them. One line of text: a name, a CRC-32C, a JSON object, spaces.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import attrs
import msgspec
from google_crc32c import value as crc32c

from kvledger.lifecycle.untrusted import from_json
from kvledger.storage.events.files import open_for_writing, read_file, sync_directory

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["END_RECORD_NAME", "EndRecord", "RecordedEnd", "read_end_record"]

END_RECORD_NAME: Final = "log.end"
_NAME: Final = b"KVLEDGEREND"
_NUM_BYTES: Final = 1024
_MAX_REASON_BYTES: Final = 300


@attrs.frozen
class RecordedEnd:
    """How far a log got when its record was written."""

    log_id: str
    segment: str
    """The newest segment."""
    next_sequence: int
    """The sequence number behind the last event that was written."""
    head_hash: str
    """The chain hash there, hexadecimal."""
    is_closed: bool = False
    num_unwritten: int = 0
    """Events from `next_sequence` on that had been taken and could not be written."""
    reason: str = ""
    """Why not."""
    expected_sequence: int | None = None
    """The sequence number behind the last event that the log's writer had recorded when it closed the log, by its own
    count; None: it gave none."""

    @property
    def end_sequence(self) -> int:
        """The sequence number behind the last event that is known to have been taken."""
        return max(self.next_sequence + self.num_unwritten, self.expected_sequence or 0)


class EndRecord:
    """The record as the log's writer keeps it."""

    def __init__(self, directory: Path, recorded: RecordedEnd, *, durable: bool) -> None:
        """Write the record of the log in `directory`, in place of one that is there. Raises `OSError`."""
        self.recorded = recorded
        self._durable = durable
        self._descriptor = open_for_writing(directory / END_RECORD_NAME, os.O_WRONLY | os.O_CREAT)
        try:
            self.note(recorded)
            if durable:
                sync_directory(directory)
        except BaseException:
            os.close(self._descriptor)
            raise

    def note(self, recorded: RecordedEnd) -> None:
        """Write the record anew. Raises `OSError`; then it is as it was, or torn, which its CRC tells."""
        if os.pwrite(self._descriptor, _encode(recorded), 0) < _NUM_BYTES:
            msg = f"{END_RECORD_NAME}: only a part of {_NUM_BYTES} bytes could be written"
            raise OSError(msg)
        if self._durable:
            os.fdatasync(self._descriptor)
        self.recorded = recorded

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)


def read_end_record(directory: Path) -> RecordedEnd | None:
    """The record in `directory`; None where there is none that is intact and can be read."""
    try:
        name, crc, body = read_file(directory / END_RECORD_NAME).split(b" ", 2)
        if name != _NAME or crc != _checksum(body):
            return None
        return from_json(body, RecordedEnd)
    except (OSError, ValueError):
        return None


def _encode(recorded: RecordedEnd) -> bytes:
    num_bytes = _NUM_BYTES - len(_NAME) - 10
    reason = recorded.reason.encode(errors="replace")[:_MAX_REASON_BYTES].decode(errors="ignore")
    body = msgspec.json.encode(attrs.evolve(recorded, reason=reason))
    if len(body) >= num_bytes:  # escapes: a reason of control characters
        body = msgspec.json.encode(attrs.evolve(recorded, reason=""))
    body = body.ljust(num_bytes - 1) + b"\n"
    return b"%s %s %s" % (_NAME, _checksum(body), body)


def _checksum(body: bytes) -> bytes:
    return b"%08x" % crc32c(body)
