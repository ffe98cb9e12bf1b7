"""`kvledger retire`: keep logs at rest to a size and an age. The only command that takes anything from a log.

Whole segments go, the oldest first, each recorded before it is deleted; `verify` then says what was retired, when and
why, and that the rest follows from it. A log that is being written is left to its writer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import attrs

from kvledger.adapters.cli.default_log import LogArgument
from kvledger.adapters.cli.output import Output
from kvledger.adapters.cli.quantities import num_bytes, seconds
from kvledger.adapters.exit_codes import CommandFailed, ExitCode
from kvledger.adapters.logs.amounts import plural, size
from kvledger.storage.events import LogError, Retirement, retire, retire_logs
from kvledger.storage.events.segment_file import segment_paths


def configure(parser: argparse.ArgumentParser) -> None:
    """Its arguments."""
    parser.add_argument(
        "log", action=LogArgument, type=Path, help="a log directory, or a directory of logs (all of them)"
    )
    parser.add_argument("--max-bytes", metavar="SIZE", type=num_bytes, help="what may stay, such as 2GiB")
    parser.add_argument("--max-age", metavar="AGE", type=seconds, help="how long ago a segment may be written, as 30d")
    parser.add_argument("--dry-run", action="store_true", help="say what would be retired, and delete nothing")


def run(arguments: argparse.Namespace, output: Output) -> ExitCode:
    """Retire, and say what."""
    if arguments.max_bytes is None and arguments.max_age is None:
        raise CommandFailed("give --max-bytes, --max-age or both; without a limit everything stays")
    try:
        retired = _retire(arguments.log, arguments, output)
    except (LogError, OSError) as error:
        raise CommandFailed(f"{arguments.log}: {error}", ExitCode.DAMAGED) from error
    if output.is_json:
        for each in retired:
            output.record("retirement", {**attrs.asdict(each), "dry_run": arguments.dry_run})
        return ExitCode.SOUND
    for each in retired:
        events = f"events {each.first_sequence} to {each.last_sequence}"
        output.line(f"{each.log}/{each.segment}: {events}, {size(each.num_bytes)}, by {each.reason}")
    freed = size(sum(each.num_bytes for each in retired))
    verb = "would be retired" if arguments.dry_run else "retired"
    output.line(f"{plural(len(retired), 'segment')} {verb}, {freed}")
    return ExitCode.SOUND


def _retire(log: Path, arguments: argparse.Namespace, output: Output) -> list[Retirement]:
    is_log = log.is_dir() and bool(segment_paths(log))
    if not is_log and not any(segment_paths(child) for child in log.glob("*/")):
        raise CommandFailed(f"{log}: give a log directory, or a directory of logs")
    limits = {"max_bytes": arguments.max_bytes, "max_age_seconds": arguments.max_age}
    if is_log:
        return retire(log, **limits, dry_run=arguments.dry_run)

    def name(error: OSError | LogError) -> None:
        output.unreadable(Path(str(getattr(error, "filename", None) or log)), error)

    return retire_logs(log, **limits, dry_run=arguments.dry_run, on_trouble=name)
