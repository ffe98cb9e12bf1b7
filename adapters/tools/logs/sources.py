"""Finds the logs that a LOG argument means: one log, one segment of a log, or all logs of a directory or stream.

Every engine start writes a log directory below `log_dir`. This module decides for all commands which logs belong to the
same start, and which start is the newest.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode, unreadable_text
from kvledger.adapters.tools.logs.streams import StreamUrl, mirrored_logs, shown_log, was_stream
from kvledger.adapters.tools.logs.visible import remark
from kvledger.storage.events import LogError, read_log
from kvledger.storage.events.files import RefusedFile, directories_in, links_in
from kvledger.storage.events.reader import traces_of_log
from kvledger.storage.events.retirements import RETIREMENTS_NAME
from kvledger.storage.events.segment_file import segment_paths

_MAX_NAMED = 10
_DATA_PARALLEL = re.compile(r"_dp\d+$")


@attrs.frozen
class EngineStart:
    """The logs of one engine start: the scheduler's log and the logs of its workers.

    Workers write logs only if they use the recorder. A start that failed before the scheduler opened its log has only
    workers' logs.
    """

    scheduler: Path | None
    workers: tuple[Path, ...]
    """The workers' logs, in the order in which they were opened."""
    opened_at: int
    """When the scheduler's log or, without one, the first worker's log was opened, in nanoseconds since 1970."""
    engine_id: str = ""
    """vLLM's engine id; empty: not in the log. With data parallelism, the ids of the engines end with `_dpN`."""
    connector: str = ""
    """Name of the recorded connector; empty: the start used kvledger's own connector."""

    @property
    def logs(self) -> list[Path]:
        """All logs of the start, the scheduler's log last."""
        return [*self.workers, *([] if self.scheduler is None else [self.scheduler])]

    @property
    def main(self) -> Path:
        """The scheduler's log, or the last of the workers' logs if there is no scheduler's log."""
        return self.logs[-1]


@attrs.frozen
class _Log:
    """A log, with the parts of its header that show to which engine start the log belongs."""

    path: Path
    opened_at: int
    header: Mapping[str, object]

    @property
    def rank(self) -> int | None:
        rank = self.header.get("worker_rank")
        return rank if isinstance(rank, int) else None

    @property
    def engine(self) -> tuple[str, str]:
        """(engine id, recorded connector)."""
        return str(self.header.get("engine_id") or ""), str(self.header.get("connector") or "")


def find_logs(
    path: Path | StreamUrl,
    mirror: Path | None = None,
    *,
    newest: bool = False,
    on_remark: Callable[[str], None] = remark,
) -> list[Path]:
    """Return the logs that `path` means: the log at this path, or all logs in this directory or stream.

    Logs of the same engine start are next to each other, the scheduler's log last. The logs of a stream are first
    mirrored into the directory `mirror`. This takes time. With `newest`, only logs of the newest start are mirrored. If
    `path` is a link, the returned paths are below its target. `on_remark` gets remarks for the user; default: stderr.

    Raises:
        CommandFailed: there is no log.
    """
    if isinstance(path, StreamUrl):
        return _by_start(mirrored_logs(path, mirror, newest=newest))
    if path.is_symlink() and not path.exists():
        error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        raise CommandFailed(unreadable_text(error), ExitCode.DAMAGED)
    if not path.exists():
        if was_stream(path):
            message = "this command reads files only; `kvledger ship --list URL` lists the logs of a stream"
            raise CommandFailed(f"{shown_log(path)}: {message}", ExitCode.USAGE)
        raise CommandFailed(f"{shown_log(path)} does not exist; give a log directory or a *.kvlog file", ExitCode.USAGE)
    path = _without_link(path)
    if not path.is_dir() or segment_paths(path) or _has_traces(path, on_remark):
        return [path]
    # Keep links, so that `open_log` refuses them and the user notices.
    links = [link for link in links_in(path) if link.name != RETIREMENTS_NAME]
    logs = [*(child for child in directories_in(path) if _may_be_log(child)), *links]
    if not logs:
        message = (
            f"{path} contains no log: no segments (*.kvlog) and no folder with segments; give the log_dir or a log"
        )
        raise CommandFailed(message, ExitCode.USAGE)
    return _by_start(logs)


def _has_traces(directory: Path, on_remark: Callable[[str], None]) -> bool:
    """Whether the directory was a log whose segments are gone, as its end record or record of retirements shows.

    If such a record is not a regular file, print a remark and return False.
    """
    try:
        return bool(traces_of_log(directory))
    except RefusedFile as error:
        on_remark(str(error))
        return False


def _without_link(path: Path) -> Path:
    """Return the path that a user gave, or its target if it is a link. `open_log` refuses links inside a directory.

    Raises:
        CommandFailed: the path leads to something without a name, such as the pipe of a shell's `<(…)`.
    """
    real = path.resolve() if path.is_symlink() else path
    if not real.exists():
        message = f"{path} leads to a pipe or a deleted file, which kvledger does not read; give a regular file"
        raise CommandFailed(message, ExitCode.DAMAGED)
    return real


def _by_start(logs: Sequence[Path]) -> list[Path]:
    return [path for start in engine_starts(logs) for path in start.logs]


def engine_starts(logs: Iterable[Path]) -> list[EngineStart]:
    """Return the engine starts of these logs, the newest last. An unreadable log is a start of its own."""
    found = [_looked_at(path) for path in logs]
    schedulers = [log for log in found if log.rank is None]
    workers = sorted((log for log in found if log.rank is not None), key=_order)
    starts = []
    assigned: set[Path] = set()
    for scheduler, its in _assigned(schedulers, workers):
        paths = tuple(log.path for log in sorted(its, key=_order))
        assigned.update(paths)
        starts.append(EngineStart(scheduler.path, paths, scheduler.opened_at, *scheduler.engine))
    left: dict[tuple[str, str], list[_Log]] = {}
    for log in workers:  # of starts that failed, or whose scheduler's log is gone
        if log.path in assigned:
            continue
        group = left.setdefault(log.engine, [])
        if any(other.rank == log.rank for other in group):
            starts.append(_without_scheduler(group))
            group = left[log.engine] = []
        group.append(log)
    starts += map(_without_scheduler, left.values())
    return sorted(starts, key=lambda start: (start.opened_at, start.main.name))


def start_of(log: Path) -> EngineStart:
    """Return the engine start that wrote this log, with all logs of this start in the same directory."""
    siblings = [path for path in directories_in(log.parent) if path != log]
    return next(start for start in engine_starts([log, *siblings]) if log in start.logs)


def workers_of(scheduler: Path) -> dict[int, Path]:
    """Return rank → log for the workers of the scheduler that wrote this log. Searches the same directory."""
    own = start_of(scheduler)
    ranks = {_looked_at(path).rank: path for path in own.workers if own.scheduler == scheduler}
    return dict(sorted((rank or 0, path) for rank, path in ranks.items()))


def started_with(start: EngineStart, starts: Sequence[EngineStart]) -> list[EngineStart]:
    """Return the other engine starts that belong to the same start of the server.

    A server has several engine starts if it uses data parallelism, or a connector that wraps several connectors. Their
    vLLM engine ids are equal, except that data parallelism adds a suffix `_dpN` (vLLM 0.32: `vllm/v1/engine/core.py`).
    """
    if not start.engine_id:
        return []

    def whose(other: EngineStart) -> tuple[str, str]:
        return other.engine_id, other.connector

    before = [each.opened_at for each in starts if whose(each) == whose(start) and each.opened_at < start.opened_at]
    newest: dict[tuple[str, str], EngineStart] = {}
    for other in starts:
        is_of_server = _DATA_PARALLEL.sub("", other.engine_id) == _DATA_PARALLEL.sub("", start.engine_id)
        if is_of_server and whose(other) != whose(start) and other.opened_at > max(before, default=0):
            newest[whose(other)] = other
    return list(newest.values())


def one_of(logs: Sequence[Path], asked: Path | StreamUrl) -> Path:
    """Return the main log of the only engine start in `logs`, for a command that reads one log.

    `asked` is the LOG argument of the command.

    Raises:
        CommandFailed: there are several starts.
    """
    if len(logs) == 1:
        return logs[0]
    starts = [start.main for start in engine_starts(logs)]
    if len(starts) == 1:
        return starts[0]
    named = ", ".join(map(str, starts[-_MAX_NAMED:]))
    more = f" and {len(starts) - _MAX_NAMED} older ones" if len(starts) > _MAX_NAMED else ""
    message = (
        f"{asked} contains {len(starts)} logs (`kvledger ls` lists them); name one, the newest is last: {named}{more}"
    )
    raise CommandFailed(message, ExitCode.USAGE)


def _assigned(schedulers: Iterable[_Log], workers: Iterable[_Log]) -> Iterator[tuple[_Log, list[_Log]]]:
    """Yield each scheduler's log with the logs of its workers: at most one per rank, and no log twice.

    A worker's log has the same engine id and connector as its scheduler's log. This does not identify the start,
    because an engine id that the configuration sets stays the same after a restart. A worker's log belongs to the
    scheduler's log that the same process wrote. If there is none, it belongs to the scheduler's log that was opened
    next after the worker's log, or else to the last scheduler's log opened before the worker's log.
    """
    schedulers = list(schedulers)
    pairs = []
    for scheduler, worker in itertools.product(schedulers, workers):
        if worker.engine == scheduler.engine and worker.engine[0]:
            distance = worker.opened_at - scheduler.opened_at
            process = worker.header.get("process_id")
            is_same_process = process is not None and process == scheduler.header.get("process_id")
            order = (not is_same_process, distance > 0 and not is_same_process, abs(distance))
            pairs.append((order, scheduler, worker))
    ranks: dict[Path, dict[int | None, _Log]] = {scheduler.path: {} for scheduler in schedulers}
    taken: set[Path] = set()
    for _, scheduler, worker in sorted(pairs, key=lambda pair: pair[0]):
        if worker.path not in taken and worker.rank not in ranks[scheduler.path]:
            ranks[scheduler.path][worker.rank] = worker
            taken.add(worker.path)
    for scheduler in schedulers:
        yield scheduler, list(ranks[scheduler.path].values())


def _without_scheduler(workers: Sequence[_Log]) -> EngineStart:
    return EngineStart(None, tuple(log.path for log in workers), workers[0].opened_at, *workers[0].engine)


def _order(log: _Log) -> tuple[int, str]:
    return log.opened_at, log.path.name


def _may_be_log(path: Path) -> bool:
    """Whether a directory is a log, was a log whose segments are gone, or cannot be read and may therefore be a log."""
    try:
        return bool(segment_paths(path) or traces_of_log(path))
    except FileNotFoundError:
        return False  # its last segment was retired since its name was read
    except OSError:
        return True


def _looked_at(log: Path) -> _Log:
    if log.is_symlink():
        return _Log(log, 0, {})  # so that a link is never the newest log
    try:
        header = read_log(log).header
        opened_at = header.get("opened_at_unix_ns")
        opened_at = opened_at if isinstance(opened_at, int) else segment_paths(log)[-1].lstat().st_mtime_ns
        return _Log(log, opened_at, header)
    except (LogError, OSError, IndexError):
        return _Log(log, _modified_at(log), {})


def _modified_at(log: Path) -> int:
    try:
        return log.lstat().st_mtime_ns
    except OSError:
        return 0
