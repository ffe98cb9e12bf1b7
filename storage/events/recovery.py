"""Making a log fit for appending again: find its end, and lay a torn tail aside. Runs under the writer's lock.

Only what a crash can leave is repaired: bytes behind the last intact frame of the last segment. They are kept beside it
as ``<segment>.torn-<offset>``. Anything else is `LogDamaged`, because appending behind it would bury the evidence.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import attrs

from kvledger.storage.events.errors import LogDamaged
from kvledger.storage.events.files import sync_directory, write_file
from kvledger.storage.events.reader import Damage, LogReader
from kvledger.storage.events.segment_file import UNFINISHED_SUFFIX

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LogEnd", "RecoveryReport", "recover"]


@attrs.frozen
class RecoveryReport:
    """What opening a log found and did. `num_bytes_cut` is 0 for a log that was closed properly.

    `first_lost_sequence` is the sequence number that the cut frame would have had; how many events it held is unknown.
    """

    num_frames: int = 0
    num_bytes_cut: int = 0
    segment: str | None = None
    first_lost_sequence: int | None = None
    kept_as: Path | None = None
    detail: str = ""


@attrs.frozen
class LogEnd:
    """Where a log ends: file, offset behind the last frame, next sequence number, and the two hashes (16 bytes)."""

    segment: Path
    offset: int
    next_sequence: int
    chain_hash: bytes
    head_hash: bytes


def recover(directory: Path) -> tuple[LogReader, LogEnd, RecoveryReport]:
    """Read the whole log, lay a torn tail aside, and say where to go on.

    Raises:
        LogDamaged: something is wrong before the tail; nothing was changed.
        LogTooNew: a later version wrote it.
        LogError: there is no log.
        OSError: the tail could not be laid aside; nothing was changed.

    """
    reader = LogReader(directory, settle_seconds=0)  # nobody else writes
    num_frames = sum(1 for _ in reader)
    torn = reader.unreadable_end
    for damage in reader.damage:
        if damage != torn:
            _refuse(directory, damage)
    if reader.tail is None or reader.head_hash is None:
        msg = f"{directory}: no segment has an intact header; read it with read_log, and create a new log elsewhere"
        raise LogDamaged(msg)
    segment, offset = reader.tail
    _remove_unfinished(directory)
    report = RecoveryReport(num_frames)
    if torn is not None:
        report = _lay_aside(directory, torn, report)
    chain_hash = reader.chain_hash if reader.chain_hash is not None else reader.head_hash
    return reader, LogEnd(segment, offset, reader.next_sequence, chain_hash, reader.head_hash), report


def _refuse(directory: Path, damage: Damage) -> None:
    msg = (
        f"{directory / damage.segment}: {damage.kind} at offset {damage.offset} (sequence {damage.sequence}): "
        f"{damage.detail}; nothing is appended to it. Read what is intact with read_log, and create a new log elsewhere"
    )
    raise LogDamaged(msg)


def _lay_aside(directory: Path, torn: Damage, report: RecoveryReport) -> RecoveryReport:
    segment = directory / torn.segment
    kept_as = _unused_name(directory / f"{torn.segment}.torn-{torn.offset}")
    if torn.offset == 0:
        segment.rename(kept_as)
    else:
        _keep_and_cut(segment, torn.offset, kept_as)
    return attrs.evolve(
        report,
        num_bytes_cut=torn.num_bytes,
        segment=torn.segment,
        first_lost_sequence=torn.sequence,
        kept_as=kept_as,
        detail=torn.detail,
    )


def _keep_and_cut(segment: Path, offset: int, kept_as: Path) -> None:
    """Copy what stands behind `offset` to a new file, and cut it off only when the copy is on disk."""
    descriptor = os.open(segment, os.O_RDWR | os.O_CLOEXEC)
    try:
        num_bytes = os.fstat(descriptor).st_size - offset
        try:
            write_file(kept_as, os.pread(descriptor, num_bytes, offset), durable=True, exclusive=True)
        except OSError:
            kept_as.unlink(missing_ok=True)
            raise
        sync_directory(segment.parent)
        os.ftruncate(descriptor, offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_unfinished(directory: Path) -> None:
    """A segment that never got its name holds no frame."""
    for unfinished in directory.glob(f"*{UNFINISHED_SUFFIX}"):
        unfinished.unlink()


def _unused_name(wanted: Path) -> Path:
    """Return `wanted`, numbered if an earlier recovery cut at the same place."""
    name, number = wanted, 1
    while name.exists():
        number += 1
        name = wanted.with_name(f"{wanted.name}-{number}")
    return name
