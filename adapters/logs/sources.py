"""From the LOG argument to the logs it means: one log, one segment of it, all logs of a directory or of a stream.

Every engine start writes a log directory of its own below `log_dir`, so a directory of logs is what an operator has.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from kvledger.adapters.exit_codes import CommandFailed, ExitCode, unreadable_text
from kvledger.adapters.logs.streams import StreamUrl, mirrored_logs
from kvledger.storage.events import LogError, read_log
from kvledger.storage.events.reader import traces_of_log
from kvledger.storage.events.segment_file import segment_paths

_MAX_NAMED = 10


def find_logs(path: Path | StreamUrl, mirror: Path | None = None, *, newest: bool = False) -> list[Path]:
    """The logs that `path` means, in the order in which they were opened: itself, or those in the directory.

    The URL of a stream means its logs, of which a mirror is made first (in the directory `mirror`); with `newest` only
    of the newest, since that takes time.

    Raises:
        CommandFailed: there is none.
    """
    if isinstance(path, StreamUrl):
        return sorted(mirrored_logs(path, mirror, newest=newest), key=lambda log: (_opened_at(log), log.name))
    if path.is_symlink() and not path.exists():
        error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        raise CommandFailed(unreadable_text(error), ExitCode.DAMAGED)
    if not path.exists():
        raise CommandFailed(f"{path}: there is nothing; give a log directory or a *.kvlog file", ExitCode.USAGE)
    if not path.is_dir() or segment_paths(path) or traces_of_log(path):
        return [path]
    logs = [child for child in path.iterdir() if _may_be_log(child)]
    if not logs:
        message = f"{path}: holds no log, neither segments (*.kvlog) nor a folder with some; is it the log_dir?"
        raise CommandFailed(message, ExitCode.USAGE)
    return sorted(logs, key=lambda log: (_opened_at(log), log.name))


def one_of(logs: Sequence[Path], asked: Path | StreamUrl) -> Path:
    """The only log that `asked` means, for commands that compare or continue something.

    Raises:
        CommandFailed: it means several.
    """
    if len(logs) == 1:
        return logs[0]
    named = ", ".join(str(log) for log in logs[-_MAX_NAMED:])
    more = f" and {len(logs) - _MAX_NAMED} older ones" if len(logs) > _MAX_NAMED else ""
    message = (
        f"{asked} holds {len(logs)} logs (`kvledger ls` lists them); name one, the newest is the last: {named}{more}"
    )
    raise CommandFailed(message, ExitCode.USAGE)


def _may_be_log(path: Path) -> bool:
    """Whether it is a log, was one whose segments are gone, or cannot be looked at: opening it says why."""
    try:
        if path.is_dir():
            return bool(segment_paths(path) or traces_of_log(path))
        return path.is_symlink() and not path.exists()
    except FileNotFoundError:
        return False  # it vanished since its name was read: the last segment was retired
    except OSError:
        return True


def _opened_at(log: Path) -> int:
    try:
        opened_at = read_log(log).header.get("opened_at_unix_ns")
        return opened_at if isinstance(opened_at, int) else segment_paths(log)[-1].stat().st_mtime_ns
    except (LogError, OSError, IndexError):
        return _modified_at(log)


def _modified_at(log: Path) -> int:
    try:
        return log.lstat().st_mtime_ns
    except OSError:
        return 0
