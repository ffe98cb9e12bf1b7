"""Keeping logs to a size and an age: the oldest whole segments go first, each recorded before it is deleted.

Of a log that is being written the last segment stays; one that is closed may go altogether. The age of a segment is
the time since it was last written to. Nothing that is no part of a log is touched.

The record: `retired.jsonl` in a log's directory, one line a segment, on disk before the segment is deleted; in a
directory of logs, the same for the last segments of logs that are gone altogether. With it a log without its beginning
can be distinguished from one whose segments were deleted by hand. A line that a crash tore is passed over.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

import attrs
import msgspec

from kvledger.storage.events.end_record import END_RECORD_NAME
from kvledger.storage.events.files import append_line, read_file, sync_directory
from kvledger.storage.events.segment_bytes import SegmentBytes
from kvledger.storage.events.segment_file import SNAPSHOT_SUFFIX, SegmentHeader, read_header, segment_paths
from kvledger.storage.events.store import LogDamaged, LogError, LogLocked
from kvledger.storage.events.writer_lock import LOCK_NAME, lock_directory, unlock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = [
    "RETIREMENTS_NAME",
    "Retirement",
    "read_retirements",
    "retire",
    "retire_logs",
    "retired_between",
    "write_retirement",
]

RETIREMENTS_NAME: Final = "retired.jsonl"
_PARTS_OF_A_LOG: Final = (
    "*.kvlog",
    f"*{SNAPSHOT_SUFFIX}",
    "*.unfinished",
    RETIREMENTS_NAME,
    END_RECORD_NAME,
    LOCK_NAME,
)
_RECORDS: Final = (RETIREMENTS_NAME, END_RECORD_NAME)
Trouble = Callable[[OSError | LogError], None]


def ignore(_error: OSError | LogError) -> None:
    """Report to nobody."""


@attrs.frozen
class Retirement:
    """One retired segment. `log` is the name of its directory; hashes are hexadecimal."""

    log: str
    log_id: str
    segment: str
    first_sequence: int
    last_sequence: int
    previous_head_hash: str
    """The chain hash before its first frame, as its header named it."""
    head_hash: str
    """The chain hash of its last frame, which the next segment's header names."""
    num_bytes: int
    reason: Literal["age", "size"]
    retired_at_unix_ns: int


def write_retirement(directory: Path, retirement: Retirement) -> None:
    """Append to the record in `directory`; it is on disk when this returns. Raises `OSError`."""
    append_line(directory / RETIREMENTS_NAME, msgspec.json.encode(retirement))


def read_retirements(directory: Path) -> list[Retirement]:
    """The record in `directory`, in the order in which it was written; empty where there is none."""
    try:
        lines = read_file(directory / RETIREMENTS_NAME).splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=Retirement))
        except msgspec.MsgspecError:
            continue
    return found


def retired_between(
    retirements: Sequence[Retirement], log_id: object, first_sequence: int, end_sequence: int
) -> list[Retirement] | None:
    """The retirements that account for `first_sequence` up to before `end_sequence`, without a hole, in order.

    They may begin earlier. None: there is a hole, or one does not follow from the other.
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


@attrs.define(eq=False)
class _Log:
    """A log whose oldest segments may go; `may_vanish`: all of them, and the directory."""

    directory: Path
    may_vanish: bool
    segments: deque[Path]

    @classmethod
    def at(cls, directory: Path, *, may_vanish: bool) -> _Log:
        return cls(directory, may_vanish, deque(segment_paths(directory)))

    @property
    def oldest(self) -> Path | None:
        """The segment that goes next."""
        return self.segments[0] if len(self.segments) > (0 if self.may_vanish else 1) else None

    def describe_oldest(self, reason: Literal["age", "size"], now_unix_ns: int) -> Retirement:
        """What the record will say. Raises `LogDamaged` where a header that it needs is not intact."""
        segment, header = self.segments[0], read_header(self.segments[0])
        last_sequence, head_hash = self._end_of_oldest(header)
        return Retirement(
            self.directory.name,
            header.log_id,
            segment.name,
            header.first_sequence,
            last_sequence,
            header.previous_head_hash.hex(),
            head_hash,
            segment.stat().st_size,
            reason,
            now_unix_ns,
        )

    def _end_of_oldest(self, header: SegmentHeader) -> tuple[int, str]:
        if len(self.segments) > 1:
            following = read_header(self.segments[1])
            if following.log_id != header.log_id or following.first_sequence <= header.first_sequence:
                msg = f"{self.segments[1]}: does not follow {self.segments[0].name}; nothing of this log is retired"
                raise LogDamaged(msg)
            return following.first_sequence - 1, following.previous_head_hash.hex()
        sequence, chain_hash = header.first_sequence, header.chain_hash
        with SegmentBytes(self.segments[0]) as data:
            for _, frame in data.frames(header.num_bytes, sequence, chain_hash):
                sequence, chain_hash = frame.next_sequence, frame.chain_hash
        return sequence - 1, chain_hash.hex()


def retire(
    directory: Path,
    *,
    max_bytes: int | None = None,
    max_age_seconds: float | None = None,
    dry_run: bool = False,
) -> list[Retirement]:
    """Retire the oldest segments of one log that is written by nobody, until it keeps to both limits.

    The last segment stays. Returns what was retired, or with `dry_run` what would be.

    Raises:
        LogLocked: it is being written; its writer keeps it to the limits that it was given.
        LogDamaged: a segment header is not intact, so that nothing may be deleted.
        OSError: a file could not be deleted; what had been retired before stands in the record.

    """
    with contextlib.ExitStack() as locks:
        if not dry_run:
            locks.callback(unlock, lock_directory(directory))
        log = _Log.at(directory, may_vanish=False)
        return list(_retire([log], _bytes_of(directory), max_bytes, max_age_seconds, dry_run=dry_run))


def retire_logs(
    log_dir: Path,
    *,
    max_bytes: int | None = None,
    max_age_seconds: float | None = None,
    in_use: Path | None = None,
    dry_run: bool = False,
    on_trouble: Trouble = ignore,
) -> list[Retirement]:
    """Retire the oldest segments of all logs in `log_dir`, until all together keep to both limits.

    Closed logs vanish when their last segment goes; `log_dir` keeps the record of that. `in_use` is a log that the
    caller writes: its last segment stays. Logs that others write are counted and left alone. One that cannot be read or
    deleted is passed over, after `on_trouble` was given the error.

    Raises:
        LogDamaged: of all logs that could be retired a segment header is not intact.
        OSError: `log_dir` itself cannot be read.

    """
    logs: list[_Log] = []
    num_bytes = 0
    with contextlib.ExitStack() as locks:
        for directory in sorted(path for path in log_dir.iterdir() if path.is_dir()):
            try:
                num_bytes += _bytes_of(directory)
                if in_use is not None and directory.samefile(in_use):
                    logs.append(_Log.at(directory, may_vanish=False))
                elif segment_paths(directory):
                    if not dry_run:
                        locks.callback(unlock, lock_directory(directory))
                    logs.append(_Log.at(directory, may_vanish=True))
                elif not dry_run:
                    _finish_vanishing(log_dir, directory)
            except LogLocked:
                continue
            except OSError as error:
                on_trouble(error)
        return list(_retire(logs, num_bytes, max_bytes, max_age_seconds, dry_run=dry_run, on_trouble=on_trouble))


def _retire(
    logs: list[_Log],
    num_bytes: int,
    max_bytes: int | None,
    max_age_seconds: float | None,
    *,
    dry_run: bool,
    on_trouble: Trouble | None = None,
) -> Iterator[Retirement]:
    now_unix_ns = time.time_ns()
    while True:
        candidates = [(oldest.stat().st_mtime_ns, log) for log in logs if (oldest := log.oldest) is not None]
        if not candidates:
            return
        written_ns, log = min(candidates, key=lambda candidate: (candidate[0], candidate[1].directory.name))
        is_old = max_age_seconds is not None and now_unix_ns - written_ns > max_age_seconds * 1e9
        if not is_old and (max_bytes is None or num_bytes <= max_bytes):
            return
        try:
            retirement = log.describe_oldest("age" if is_old else "size", now_unix_ns)
            segment = log.segments.popleft()
            freed = retirement.num_bytes + _size(_snapshot_of(segment))
            if not dry_run:
                _delete(log, segment, retirement)
        except LogDamaged:
            logs.remove(log)  # evidence stays
            if not logs:
                raise
            continue
        except OSError as error:
            if on_trouble is None:
                raise
            logs.remove(log)
            on_trouble(error)
            continue
        num_bytes -= freed
        yield retirement


def _delete(log: _Log, segment: Path, retirement: Retirement) -> None:
    vanishes = not log.segments
    record_in = log.directory.parent if vanishes else log.directory
    # A crash between record and deletion leaves the segment: it is found again, and recorded already.
    if not any(_is_same(retirement, each) for each in read_retirements(record_in)):
        write_retirement(record_in, retirement)
    _snapshot_of(segment).unlink(missing_ok=True)
    segment.unlink()
    if vanishes:
        _remove_parts(log.directory)


def _is_same(one: Retirement, other: Retirement) -> bool:
    return (one.log_id, one.segment, one.head_hash) == (other.log_id, other.segment, other.head_hash)


def _finish_vanishing(log_dir: Path, directory: Path) -> None:
    """Remove what a crash left of a log whose last segment was retired."""
    if any(each.log == directory.name for each in read_retirements(log_dir)):
        _remove_parts(directory)


def _remove_parts(directory: Path) -> None:
    for pattern in _PARTS_OF_A_LOG:
        for part in directory.glob(pattern):
            part.unlink()
    if not any(directory.iterdir()):
        directory.rmdir()
        sync_directory(directory.parent)


def _snapshot_of(segment: Path) -> Path:
    return segment.with_suffix(SNAPSHOT_SUFFIX)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _bytes_of(directory: Path) -> int:
    """The size of a log; its records are not counted, since they are never deleted."""
    files = (file for pattern in _PARTS_OF_A_LOG for file in directory.glob(pattern))
    return sum(_size(file) for file in files if file.name not in _RECORDS)
