"""Snapshots of a log: the state right before a segment, so that reading can begin at that segment.

A snapshot is the file ``{first_sequence of the segment:020d}.snapshot`` next to its segment. It is deleted together
with the segment. A whole log can be read without snapshots. A snapshot is used only if all of these are true:

- Its CRC matches.
- The segment's header names the same log, event and hash.
- Its `fingerprint` is the one that the caller expects.

The file has the magic ``KVLEDGERSNAP``, the CRC-32C of the rest (4 bytes, little-endian) and a msgpack map. This module
must not know what the state is.
"""

from __future__ import annotations

import contextlib
import os
import struct
from typing import TYPE_CHECKING, Final

import attrs
import msgspec
from google_crc32c import value as crc32c

from kvledger.lifecycle.untrusted import Undecodable, from_msgpack
from kvledger.storage.events.files import is_regular_file, read_file, write_file
from kvledger.storage.events.segment_file import SEGMENT_SUFFIX, SNAPSHOT_SUFFIX, read_header, segment_paths
from kvledger.storage.events.store import LogError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "SNAPSHOT_FORMAT_VERSION",
    "Snapshot",
    "find_snapshot",
    "has_snapshot",
    "load_snapshot",
    "segments_without_snapshot",
    "usable_snapshot",
    "write_snapshot",
]

SNAPSHOT_FORMAT_VERSION: Final = 2
_MAGIC: Final = b"KVLEDGERSNAP"
_CRC: Final = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode


@attrs.frozen
class Snapshot:
    """The state after event `sequence`, the last event before the segment.

    `chain_hash` (16 bytes) is the log's chain hash after this event.
    """

    log_id: str
    sequence: int
    chain_hash: bytes
    fingerprint: str
    """Identifies the code and configuration for which `state` is valid."""
    state: bytes
    reader: bytes
    """Encoded state of the reader after event `sequence`, with a fingerprint of its own."""
    totals: bytes = b""
    """Encoded figures about all events up to `sequence`. Reading of later events does not need the figures."""
    format_version: int = SNAPSHOT_FORMAT_VERSION


def segments_without_snapshot(directory: Path) -> list[Path]:
    """Return the segments of a log that lack a snapshot, in order. Raises `OSError`.

    The first segment is left out, because no segment has the events before it.
    """
    return [path for path in segment_paths(directory)[1:] if not is_regular_file(path.with_suffix(SNAPSHOT_SUFFIX))]


def write_snapshot(segment: Path, snapshot: Snapshot) -> Path:
    """Write a snapshot next to `segment`, whole or not at all. Raises `OSError`.

    The file is not synced to disk. If a power cut damages it, the CRC reveals this, and readers do without it.
    """
    path = segment.with_suffix(SNAPSHOT_SUFFIX)
    body = _encode(snapshot)
    # Processes of two engines may write the snapshot at once.
    unfinished = path.with_suffix(f"{SNAPSHOT_SUFFIX}.{os.getpid()}.unfinished")
    try:
        write_file(unfinished, _MAGIC + _CRC.pack(crc32c(body)) + body, durable=False)
        unfinished.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    return path


def load_snapshot(path: Path, *, fingerprint: str) -> Snapshot | str:
    """Return the snapshot at `path`, or why it cannot be used. Does not compare it with the log."""
    snapshot = _read_snapshot(path)
    if isinstance(snapshot, str):
        return snapshot
    if (snapshot.format_version, snapshot.fingerprint) != (SNAPSHOT_FORMAT_VERSION, fingerprint):
        return f"{path.name}: stale, because another version of kvledger or of an extension made it"
    return snapshot


def has_snapshot(segment: Path) -> bool:
    """Whether `segment` has an intact snapshot of its log. The snapshot's fingerprint does not matter."""
    path = segment.with_suffix(SNAPSHOT_SUFFIX)
    snapshot = _read_snapshot(path)
    return not isinstance(snapshot, str) and not _not_of_this_log(path, snapshot, snapshot.log_id)


def _read_snapshot(path: Path) -> Snapshot | str:
    try:
        data = read_file(path)
    except OSError as error:
        return f"{path.name}: {error}"
    start = len(_MAGIC) + _CRC.size
    body = data[start:]
    is_intact = len(data) >= start and data[: len(_MAGIC)] == _MAGIC
    if not is_intact or _CRC.unpack_from(data, len(_MAGIC))[0] != crc32c(body):
        return f"{path.name}: damaged, or not a snapshot"
    try:
        return from_msgpack(body, Snapshot)
    except Undecodable as error:
        return f"{path.name}: its contents are not a snapshot: {error}"


def find_snapshot(
    directory: Path, *, log_id: str, fingerprint: str, at_most: int | None = None, newest: bool = False
) -> tuple[Snapshot | None, list[str]]:
    """Return the earliest usable snapshot of a log (with `newest`: the newest), and why other snapshots were skipped.

    A usable snapshot is intact, has this `log_id` and `fingerprint`, and belongs to the segment next to it. Snapshots
    after event `at_most` are left out.
    """
    reasons: list[str] = []
    for path in sorted(directory.glob(f"*{SNAPSHOT_SUFFIX}"), reverse=newest):
        snapshot = usable_snapshot(path, log_id=log_id, fingerprint=fingerprint)
        if isinstance(snapshot, str):
            reasons.append(snapshot)
        elif at_most is None or snapshot.sequence <= at_most:
            return snapshot, reasons
    return None, reasons


def usable_snapshot(path: Path, *, log_id: str, fingerprint: str) -> Snapshot | str:
    """Return the snapshot at `path`, or why it cannot be used. Compares it with its segment's header."""
    snapshot = load_snapshot(path, fingerprint=fingerprint)
    return snapshot if isinstance(snapshot, str) else _not_of_this_log(path, snapshot, log_id) or snapshot


def _not_of_this_log(path: Path, snapshot: Snapshot, log_id: str) -> str:
    if snapshot.log_id != log_id:
        return f"{path.name}: foreign, because it belongs to log {snapshot.log_id}"
    try:
        header = read_header(path.with_suffix(SEGMENT_SUFFIX), any_copy=True)
    except (OSError, LogError) as error:
        return f"{path.name}: {error}"
    its_place = (header.log_id, header.first_sequence - 1, header.previous_head_hash)
    if its_place != (log_id, snapshot.sequence, snapshot.chain_hash):
        return (
            f"{path.name}: foreign, because the segment's header does not name the snapshot's event "
            f"{snapshot.sequence} and chain hash"
        )
    return ""
