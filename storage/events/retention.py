"""Delete the oldest segments of logs, to keep to limits on size and age, or to make room on a full disk.

A log that is being written keeps its last segment. Any other log can be deleted completely. The age of a segment is the
time since the last write to it. Only files that belong to a log are deleted. Each deletion is recorded before it
happens (see `retirements`). If a full disk has no room for the record, the deletion is recorded directly afterwards.

After a log's oldest segment is deleted, readers begin with the snapshot of the next segment. If snapshots are made,
the oldest segment is kept until that snapshot exists, up to a limit (`SnapshotWait`). Beyond the limit, the segment is
deleted although the snapshot is missing. The record then states that the events up to the next snapshot cannot be
verified.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import attrs

from kvledger.storage.events.end_record import END_RECORD_NAME
from kvledger.storage.events.ending import is_being_written
from kvledger.storage.events.files import (
    directories_in,
    is_full,
    links_in,
    num_bytes_of,
    opened_directory,
    refused_link,
    remove_in,
    sync_directory,
)
from kvledger.storage.events.retirements import (
    RETIREMENTS_NAME,
    Retirement,
    RetirementReason,
    last_retirement,
    read_retirements,
    write_retirement,
)
from kvledger.storage.events.segment_bytes import SegmentBytes
from kvledger.storage.events.segment_file import (
    SNAPSHOT_SUFFIX,
    UNFINISHED_SUFFIX,
    SegmentHeader,
    read_header,
    segment_paths,
)
from kvledger.storage.events.snapshots import has_snapshot
from kvledger.storage.events.store import LogDamaged, LogError, LogLocked
from kvledger.storage.events.writer_lock import LOCK_NAME, lock_directory, locked, unlock

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

__all__ = ["SnapshotWait", "Trouble", "free_bytes", "ignore", "make_room", "num_log_bytes", "retire", "retire_logs"]

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
    """Ignore the error."""


@attrs.define
class SnapshotWait:
    """How long retention keeps a segment whose next segment has no snapshot."""

    excess_bytes: int = 0
    """The segment is kept as long as the logs exceed their size limit by at most this many bytes."""
    excess_seconds: float = 0.0
    """The segment is kept as long as it exceeds the age limit by at most this many seconds."""
    given_up: Collection[Path] = ()
    """Directories of logs whose missing snapshots cannot be made. Retention does not wait for these snapshots."""
    waits_for: Path | None = None
    """Set by retention: directory of the log whose snapshot is missing. None: retention did not wait for a snapshot."""


@attrs.frozen
class _Due:
    """Why a segment is deleted. With `is_urgent`, it is deleted even if the next segment has no snapshot."""

    reason: RetirementReason
    is_urgent: bool = True


_Judge = Callable[[int, float], _Due | None]
"""(bytes of all logs, age of the oldest segment in seconds) → why this segment is deleted; None: it is kept."""


def _over_limits(max_bytes: int | None, max_age_seconds: float | None, wait: SnapshotWait | None) -> _Judge:
    def judge(num_bytes: int, age_seconds: float) -> _Due | None:
        bytes_over = 0 if max_bytes is None else num_bytes - max_bytes
        seconds_over = 0.0 if max_age_seconds is None else age_seconds - max_age_seconds
        if bytes_over <= 0 and seconds_over <= 0:
            return None
        is_urgent = wait is None or bytes_over > wait.excess_bytes or seconds_over > wait.excess_seconds
        return _Due("age" if seconds_over > 0 else "size", is_urgent)

    return judge


def free_bytes(directory: Path) -> int:
    """Return the bytes that this user may still write to the file system of `directory`. Raises `OSError`."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


@attrs.define(eq=False)
class _Log:
    """A log whose oldest segments may be deleted. With `may_vanish`, all segments and the directory may be deleted."""

    directory: Path
    status: os.stat_result
    """Status that identifies the directory. If another directory has taken its name, nothing in that one is deleted."""
    may_vanish: bool
    segments: deque[Path]

    @classmethod
    def at(cls, directory: Path, *, may_vanish: bool) -> _Log:
        return cls(directory, directory.lstat(), may_vanish, deque(segment_paths(directory)))

    @property
    def oldest(self) -> Path | None:
        return self.segments[0] if len(self.segments) > (0 if self.may_vanish else 1) else None

    @property
    def is_rest_verifiable(self) -> bool:
        """Whether the log can be verified after its oldest segment is deleted.

        False if the next segment has no intact snapshot.
        """
        return len(self.segments) == 1 or has_snapshot(self.segments[1])

    def describe_oldest(self, reason: RetirementReason, now_unix_ns: int, *, is_rest_verifiable: bool) -> Retirement:
        """Return the record of the oldest segment's retirement.

        Raises `LogDamaged` if the header of this segment or of the next one is not intact.
        """
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
            num_bytes_of(segment),
            reason,
            now_unix_ns,
            is_rest_verifiable,
        )

    def _end_of_oldest(self, header: SegmentHeader) -> tuple[int, str]:
        if len(self.segments) > 1:
            following = read_header(self.segments[1])
            if following.log_id != header.log_id or following.first_sequence <= header.first_sequence:
                msg = f"{self.segments[1]}: does not follow {self.segments[0].name}, so this log's segments are kept"
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
    """Retire the oldest segments of a log that no process writes, until the log is within both limits.

    The last segment is kept. Returns the retired segments. With `dry_run`, nothing is deleted, and the function returns
    the segments that would be retired.

    Raises:
        LogLocked: the log is being written. Its writer retires segments by its own limits.
        LogDamaged: a segment header is not intact, so no further segment is deleted.
        OSError: a file could not be deleted. The segments that were deleted before are recorded.
    """
    if directory.is_symlink():
        directory = directory.resolve()
    with contextlib.ExitStack() as locks:
        if not dry_run:
            locks.callback(unlock, lock_directory(directory))
        elif is_being_written(directory):
            raise locked(directory)
        log = _Log.at(directory, may_vanish=False)
        judge = _over_limits(max_bytes, max_age_seconds, None)
        return list(_retire([log], _bytes_of(directory), judge, dry_run=dry_run))


def retire_logs(
    log_dir: Path,
    *,
    max_bytes: int | None = None,
    max_age_seconds: float | None = None,
    in_use: Path | None = None,
    dry_run: bool = False,
    on_trouble: Trouble = ignore,
    wait: SnapshotWait | None = None,
) -> list[Retirement]:
    """Retire the oldest segments of all logs in `log_dir` until the logs together are within both limits.

    If the last segment of a log is retired, the log's directory is deleted, too. The record of this retirement is in
    `log_dir`. `in_use` is the log that the caller writes. The last segment of `in_use` is kept. Logs that other
    processes write keep all segments, but count towards the limits.

    Logs with a damaged header are skipped. Logs that cannot be read or deleted are reported to `on_trouble` and
    skipped. Without `wait`, retention waits for no snapshot. Returns the retired segments; with `dry_run`, the segments
    that would be retired.

    Raises:
        LogDamaged: every log that no other process writes was skipped, the last one because of a damaged header.
        OSError: `log_dir` itself cannot be read.
    """
    judge = _over_limits(max_bytes, max_age_seconds, wait)
    with _locked_logs(log_dir, in_use, dry_run=dry_run, on_trouble=on_trouble) as (logs, num_bytes):
        return list(_retire(logs, num_bytes, judge, dry_run=dry_run, on_trouble=on_trouble, wait=wait))


def make_room(
    log_dir: Path, num_free_bytes: int, *, in_use: Path | None = None, on_trouble: Trouble = ignore
) -> list[Retirement]:
    """Retire the oldest segments of all logs in `log_dir` until `num_free_bytes` of the disk are free.

    Stops earlier if no further segment may be retired. Waits for no snapshot. A deleted segment counts as free space,
    even if a reader keeps the file open. Returns the retired segments, and raises the errors of `retire_logs`.
    """
    free_before = free_bytes(log_dir)
    with _locked_logs(log_dir, in_use, dry_run=False, on_trouble=on_trouble) as (logs, num_bytes):

        def judge(num_bytes_left: int, _age_seconds: float) -> _Due | None:
            num_free = max(free_bytes(log_dir), free_before + num_bytes - num_bytes_left)
            return _Due("full") if num_free < num_free_bytes else None

        return list(_retire(logs, num_bytes, judge, dry_run=False, on_trouble=on_trouble))


def num_log_bytes(log_dir: Path) -> int:
    """Return the size of all logs in `log_dir` in bytes, as the size limit counts it. Raises `OSError`."""
    return sum(_bytes_of(directory) for directory in directories_in(log_dir))


@contextlib.contextmanager
def _locked_logs(
    log_dir: Path, in_use: Path | None, *, dry_run: bool, on_trouble: Trouble
) -> Iterator[tuple[list[_Log], int]]:
    """Yield the logs in `log_dir` that no other process writes, and the size of all logs in bytes.

    The yielded logs are locked until the context ends; with `dry_run` they are not locked.
    """
    logs: list[_Log] = []
    num_bytes = 0
    with contextlib.ExitStack() as locks:
        for link in links_in(log_dir):
            on_trouble(refused_link(link))
        for directory in directories_in(log_dir):
            try:
                num_bytes += _bytes_of(directory)
                if in_use is not None and directory.samefile(in_use):
                    logs.append(_Log.at(directory, may_vanish=False))
                elif segment_paths(directory):
                    if not dry_run:
                        locks.callback(unlock, lock_directory(directory))
                    elif is_being_written(directory):
                        continue
                    logs.append(_Log.at(directory, may_vanish=True))
                elif not dry_run:
                    _finish_vanishing(log_dir, directory)
            except LogLocked:
                continue
            except OSError as error:
                on_trouble(error)
        yield logs, num_bytes


def _retire(
    logs: list[_Log],
    num_bytes: int,
    judge: _Judge,
    *,
    dry_run: bool,
    on_trouble: Trouble | None = None,
    wait: SnapshotWait | None = None,
) -> Iterator[Retirement]:
    now_unix_ns = time.time_ns()
    while True:
        candidates = [(oldest.lstat().st_mtime_ns, log) for log in logs if (oldest := log.oldest) is not None]
        if not candidates:
            return
        written_ns, log = min(candidates, key=lambda candidate: (candidate[0], candidate[1].directory.name))
        due = judge(num_bytes, (now_unix_ns - written_ns) / 1e9)
        if due is None:
            return
        is_rest_verifiable = log.is_rest_verifiable
        if wait is not None and not (due.is_urgent or is_rest_verifiable or log.directory in wait.given_up):
            wait.waits_for = log.directory
            return
        try:
            retirement = log.describe_oldest(due.reason, now_unix_ns, is_rest_verifiable=is_rest_verifiable)
            segment = log.segments.popleft()
            freed = retirement.num_bytes + sum(map(_size, _parts_of(segment)))
            if not dry_run:
                _delete(log, segment, retirement)
        except LogDamaged:
            logs.remove(log)  # keep it as evidence
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
    has_room = True
    # A crash before the deletion may have left the entry.
    if not any(_is_same(retirement, each) for each in read_retirements(record_in)):
        try:
            write_retirement(record_in, retirement)
        except OSError as error:
            if not is_full(error):
                raise
            has_room = False  # until the segment is gone
    if vanishes and not has_room:
        with contextlib.suppress(OSError):
            write_retirement(log.directory, retirement)
    with opened_directory(log.directory, log.status) as descriptor:
        for part in _parts_of(segment):
            with contextlib.suppress(FileNotFoundError):
                remove_in(descriptor, part)
        remove_in(descriptor, segment)
    if not has_room:
        write_retirement(record_in, retirement)
    if vanishes:
        _remove_parts(log.directory, log.status)


def _is_same(one: Retirement, other: Retirement) -> bool:
    return (one.log_id, one.segment, one.head_hash) == (other.log_id, other.segment, other.head_hash)


def _finish_vanishing(log_dir: Path, directory: Path) -> None:
    """Delete the rest of a log if a crash has interrupted the retirement of its last segment."""
    status = directory.lstat()
    if not any(each.log == directory.name for each in read_retirements(log_dir)):
        last = last_retirement(directory)
        if last is None:
            return
        write_retirement(log_dir, last)
    _remove_parts(directory, status)


def _remove_parts(directory: Path, status: os.stat_result) -> None:
    with opened_directory(directory, status) as descriptor:
        for pattern in _PARTS_OF_A_LOG:
            for part in directory.glob(pattern):
                remove_in(descriptor, part)
    if not any(directory.iterdir()):
        directory.rmdir()
        sync_directory(directory.parent)


def _parts_of(segment: Path) -> list[Path]:
    """Return the paths of a segment's snapshot and of the partial compressed form that a crash may have left."""
    return [segment.with_suffix(suffix) for suffix in (SNAPSHOT_SUFFIX, UNFINISHED_SUFFIX)]


def _size(path: Path) -> int:
    try:
        return num_bytes_of(path)
    except FileNotFoundError:
        return 0


def _bytes_of(directory: Path) -> int:
    """Return the size of a log in bytes, without `retired.jsonl` and `log.end`, which retention cannot make smaller."""
    files = (file for pattern in _PARTS_OF_A_LOG for file in directory.glob(pattern))
    return sum(_size(file) for file in files if file.name not in _RECORDS)
