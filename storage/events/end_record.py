"""The end record `log.end` next to the segments: how far a log got, and whether it was closed.

The writer overwrites the record in place, which works even on a full disk. The record therefore states, even after
SIGKILL, how many events could not be written. The writer rewrites it when a segment begins, when writing events fails
or works again, and when the log is closed. Readers use it as evidence, but can read the log without it. The file is one
line of text: a name, a CRC-32C, a JSON object, spaces.
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
    """How far a log had got when the record was written."""

    log_id: str
    segment: str
    """Name of the newest segment."""
    next_sequence: int
    """Sequence number after the last written event."""
    head_hash: str
    """Chain hash after the last written event, hexadecimal."""
    is_closed: bool = False
    num_unwritten: int = 0
    """Number of events from `next_sequence` on that the writer accepted and could not write."""
    reason: str = ""
    """Why these events could not be written."""
    expected_sequence: int | None = None
    """Sequence number after the caller's last event, given to `EventStore.close`. Events that never reached the store
    are included. None: not recorded."""

    @property
    def end_sequence(self) -> int:
        """Sequence number after the last event that the writer is known to have accepted."""
        return max(self.next_sequence + self.num_unwritten, self.expected_sequence or 0)


class EndRecord:
    """The end record of a log that is being written. The record's file stays open until `close`."""

    def __init__(self, directory: Path, recorded: RecordedEnd, *, durable: bool) -> None:
        """Write the record of the log in `directory`. Raises `OSError`."""
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
        """Overwrite the record with `recorded`.

        Raises `OSError`. The file then has the old record, or an incomplete one that its CRC reveals.
        """
        if os.pwrite(self._descriptor, _encode(recorded), 0) < _NUM_BYTES:
            msg = f"{END_RECORD_NAME}: only a part of its {_NUM_BYTES} bytes could be written"
            raise OSError(msg)
        if self._durable:
            os.fdatasync(self._descriptor)
        self.recorded = recorded

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def read_end_record(directory: Path) -> RecordedEnd | None:
    """Return the end record in `directory`; None if the file is missing or not intact."""
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
    if len(body) >= num_bytes:  # control characters are escaped
        body = msgspec.json.encode(attrs.evolve(recorded, reason=""))
    body = body.ljust(num_bytes - 1) + b"\n"
    return b"%s %s %s" % (_NAME, _checksum(body), body)


def _checksum(body: bytes) -> bytes:
    return b"%08x" % crc32c(body)
