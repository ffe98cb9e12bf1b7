"""The record `retired.jsonl` of a log's retired segments, with one JSON object per line for each segment.

An entry is on disk before its segment is deleted, unless the disk is too full for the entry. Readers can therefore
distinguish retired segments from segments that were deleted by hand. The record begins with a reserved line of spaces.
On a full disk, the next entry overwrites the reserved line in place. When entries can be appended again, a new line is
reserved. Readers skip a line that a crash left incomplete.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, Final, Literal

import attrs
import msgspec

from kvledger.lifecycle.untrusted import Undecodable, from_json
from kvledger.storage.events.end_record import read_end_record
from kvledger.storage.events.files import (
    RefusedFile,
    append_line,
    is_full,
    open_for_writing,
    read_file,
    sync_directory,
    write_file,
)
from kvledger.storage.events.segment_file import UNFINISHED_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = [
    "RETIREMENTS_NAME",
    "Retirement",
    "RetirementReason",
    "last_retirement",
    "read_retirements",
    "reserve_retirement",
    "retired_between",
    "write_retirement",
]

RETIREMENTS_NAME: Final = "retired.jsonl"
RetirementReason = Literal["age", "size", "full"]
_RESERVED: Final = b" " * 1000
"""Room for an entry whose log directory has a name of 255 bytes. A usual entry takes half of it."""


@attrs.frozen
class Retirement:
    """One retired segment. `log` is the name of the log's directory. Hashes are hexadecimal."""

    log: str
    log_id: str
    segment: str
    first_sequence: int
    last_sequence: int
    previous_head_hash: str
    """Chain hash before the segment's first frame, from the segment's header."""
    head_hash: str
    """Chain hash of the segment's last frame. The header of the next segment has the same hash."""
    num_bytes: int
    reason: RetirementReason
    """`age` or `size`: a limit of the logs was exceeded. `full`: the disk had no room for a new log."""
    retired_at_unix_ns: int
    is_rest_verifiable: bool = True
    """Whether the rest of the log can be verified without this segment. True if the next segment had a snapshot, or if
    no segment remained. If False, the events up to the next snapshot can no longer be verified."""


def write_retirement(directory: Path, retirement: Retirement) -> None:
    """Append an entry to the record in `directory` and sync it to disk.

    A record that has hard links, for example after `cp -al`, is first replaced by a new file with the same entries.

    The record contains reserved lines. If the disk is full, the entry overwrites one of them.

    Raises:
        OSError: the entry could not be written, on a full disk also not over a reserved line.
    """
    line = msgspec.json.encode(retirement)
    try:
        _append(directory, line)
    except OSError as error:
        if not is_full(error) or not _write_reserved(directory / RETIREMENTS_NAME, line):
            raise
        return
    with contextlib.suppress(OSError):
        reserve_retirement(directory, durable=True)


def reserve_retirement(directory: Path, *, durable: bool) -> None:
    """Reserve a line in the record in `directory` if it has no reserved line. Raises `OSError`."""
    path = directory / RETIREMENTS_NAME
    try:
        write_file(path, _RESERVED + b"\n", durable=durable, exclusive=True)
    except FileExistsError:
        if _RESERVED not in read_file(path).splitlines():
            _append(directory, _RESERVED)


def _append(directory: Path, line: bytes) -> None:
    path = directory / RETIREMENTS_NAME
    try:
        append_line(path, line)
    except RefusedFile as error:
        if error.errno != errno.EMLINK:
            raise
        _replace_record(path, error)
        append_line(path, line)


def _replace_record(path: Path, reason: RefusedFile) -> None:
    """Replace a record that has hard links by a new file with the same entries and a reserved line."""
    unfinished = path.with_suffix(UNFINISHED_SUFFIX)
    lines = [*map(msgspec.json.encode, read_retirements(path.parent)), _RESERVED]
    try:
        write_file(unfinished, b"\n".join(lines) + b"\n", durable=True)
        unfinished.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        # Not the error of a full disk: the caller would then delete the segment first, and the record might still not
        # fit.
        raise (reason if is_full(error) else error) from error
    sync_directory(path.parent)


def _write_reserved(path: Path, line: bytes) -> bool:
    """Overwrite the record's reserved line with `line`; return whether `line` is now on disk."""
    with contextlib.suppress(OSError):
        offset = 0
        for each in read_file(path).splitlines(keepends=True):
            if each.rstrip(b"\n") == _RESERVED and len(line) <= len(_RESERVED):
                descriptor = open_for_writing(path, os.O_WRONLY)
                try:
                    data = line.ljust(len(_RESERVED))
                    num_written = os.pwrite(descriptor, data, offset)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                return num_written == len(data)
            offset += len(each)
    return False


def read_retirements(directory: Path) -> list[Retirement]:
    """Return the entries of the record in `directory`, in the order of the file. Empty if there is no record."""
    try:
        lines = read_file(directory / RETIREMENTS_NAME).splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    for line in lines:
        try:
            found.append(from_json(line.strip(), Retirement))
        except Undecodable:
            continue
    return found


def retired_between(
    retirements: Sequence[Retirement], log_id: object, first_sequence: int, end_sequence: int
) -> list[Retirement] | None:
    """Return the retirements that cover the events from `first_sequence` up to before `end_sequence`, in order.

    The first retired segment may begin before `first_sequence`. None: some of these events are in no retired segment,
    or the hashes of two neighbouring segments do not match.
    """
    by_first = {each.first_sequence: each for each in retirements if each.log_id == log_id}
    chain: list[Retirement] = []
    for begin in sorted(by_first):
        each = by_first[begin]
        if each.last_sequence < first_sequence or begin >= end_sequence:
            continue
        if not chain and begin > first_sequence:
            return None
        if chain and (chain[-1].last_sequence + 1 != begin or chain[-1].head_hash != each.previous_head_hash):
            return None
        chain.append(each)
    return chain if chain and chain[-1].last_sequence == end_sequence - 1 else None


def last_retirement(directory: Path) -> Retirement | None:
    """Return the retirement of a log's newest segment if the log's own directory has a record of it, else None.

    Such a record means that the whole log was retired. It exists only if the disk was too full for a record in the
    directory above.
    """
    ended = read_end_record(directory)
    if ended is None:
        return None
    found = (each for each in read_retirements(directory) if each.log_id == ended.log_id)
    return next((each for each in found if each.segment == ended.segment), None)
