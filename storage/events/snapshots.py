"""Snapshots of a log: the state right before a segment, so that reading can begin there.

A snapshot is the file ``{first_sequence of the segment:020d}.snapshot`` next to its segment, and is deleted with it. A
snapshot is never needed and never trusted: it is used only if its CRC matches, if the segment's header names the same
log, event and hash, and if its `fingerprint` is the reader's. This module must not know what the state is.

The file: magic ``KVLEDGERSNAP``, CRC-32C (4 bytes, little-endian) of the rest, a msgpack map.
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
    """The state after event `sequence`, the last before the segment. `chain_hash` (16 bytes) is the hash after it."""

    log_id: str
    sequence: int
    chain_hash: bytes
    fingerprint: str
    """Identifies the code and configuration for which `state` is valid."""
    state: bytes
    reader: bytes
    """The log reader's encoded state after that event, with its own fingerprint."""
    totals: bytes = b""
    """Encoded figures of all events up to that one, on which no later event depends. Empty: none."""
    format_version: int = SNAPSHOT_FORMAT_VERSION


def segments_without_snapshot(directory: Path) -> list[Path]:
    """Return the segments of a log that lack a snapshot, in order. Raises `OSError`.

    The first segment is left out: nothing is known before it.
    """
    return [path for path in segment_paths(directory)[1:] if not is_regular_file(path.with_suffix(SNAPSHOT_SUFFIX))]


def write_snapshot(segment: Path, snapshot: Snapshot) -> Path:
    """Write a snapshot next to `segment`, whole or not at all. Raises `OSError`.

    The file is not synced: its CRC reveals damage, and nothing depends on it.
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
    """Read a snapshot without comparing it with the log; return it, or why it cannot be used."""
    snapshot = _read_snapshot(path)
    if isinstance(snapshot, str):
        return snapshot
    if (snapshot.format_version, snapshot.fingerprint) != (SNAPSHOT_FORMAT_VERSION, fingerprint):
        return f"{path.name}: stale, written by code with another table, other handlers or another state"
    return snapshot


def has_snapshot(segment: Path) -> bool:
    """Whether `segment` has an intact snapshot of its log, made by any code."""
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
    """Return the earliest usable snapshot of a log (or the newest), and why others were skipped.

    Usable: intact, of this log and `fingerprint`, at or before event `at_most`, and followed by its segment.
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
    """Read a snapshot and compare it with its segment's header; return it, or why it cannot be used."""
    snapshot = load_snapshot(path, fingerprint=fingerprint)
    return snapshot if isinstance(snapshot, str) else _not_of_this_log(path, snapshot, log_id) or snapshot


def _not_of_this_log(path: Path, snapshot: Snapshot, log_id: str) -> str:
    if snapshot.log_id != log_id:
        return f"{path.name}: foreign, of log {snapshot.log_id}"
    try:
        header = read_header(path.with_suffix(SEGMENT_SUFFIX), any_copy=True)
    except (OSError, LogError) as error:
        return f"{path.name}: {error}"
    its_place = (header.log_id, header.first_sequence - 1, header.previous_head_hash)
    if its_place != (log_id, snapshot.sequence, snapshot.chain_hash):
        return f"{path.name}: foreign, its segment does not follow event {snapshot.sequence} with that hash"
    return ""
