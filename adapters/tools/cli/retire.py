"""`kvledger retire`: delete old segments, to keep logs within a size and an age. No other command deletes from a log.

`retire` deletes whole segments, the oldest first, and records each segment before deleting it. `verify` then reports
which segments were retired, when and why. Readers will begin at a snapshot after the deleted segments. If that snapshot
is missing, `retire` tries to make it first. `retire` does not touch a log that a process is writing, because that
process applies its own limits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import attrs
from cyclopts import Parameter

from kvledger.adapters.tools.cli.options import DEFAULT_LOG, num_bytes, seconds, value
from kvledger.adapters.tools.cli.output import Output, Written
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode
from kvledger.adapters.tools.logs.log import open_log
from kvledger.adapters.tools.logs.snapshots import write_snapshots
from kvledger.adapters.units import plural, size
from kvledger.storage.events import LogError, Retirement, retire, retire_logs
from kvledger.storage.events.files import RefusedFile, directories_in
from kvledger.storage.events.retention import Trouble, ignore
from kvledger.storage.events.segment_file import segment_paths


def run(
    log: Annotated[Path, Parameter(env_var=DEFAULT_LOG, help="a log directory, or a directory of several logs")],
    *,
    max_bytes: Annotated[
        int | None,
        value(
            num_bytes,
            "SIZE",
            help="delete the oldest segments until all logs together have at most SIZE, such as 2GiB",
        ),
    ] = None,
    max_age: Annotated[
        float | None, value(seconds, "AGE", help="delete segments whose last write is more than AGE (such as 30d) ago")
    ] = None,
    dry_run: Annotated[bool, Parameter(help="list the segments that would be deleted, and delete nothing")] = False,
    output: Written,
) -> ExitCode:
    """Retire segments, and list them."""
    if max_bytes is None and max_age is None:
        raise CommandFailed("without a limit nothing would be deleted; give --max-bytes, --max-age or both")
    try:
        retired = _retire(log, max_bytes, max_age, output, dry_run=dry_run)
    except RefusedFile as error:
        raise CommandFailed(str(error), ExitCode.DAMAGED) from error
    except (LogError, OSError) as error:
        raise CommandFailed(f"{log}: {error}", ExitCode.DAMAGED) from error
    if output.is_json:
        for each in retired:
            output.record("retirement", {**attrs.asdict(each), "dry_run": dry_run})
        return ExitCode.SOUND
    for each in retired:
        events = f"events {each.first_sequence} to {each.last_sequence}"
        lost = "" if each.is_rest_verifiable or dry_run else "; later events can no longer be verified"
        output.line(f"{each.log}/{each.segment}: {events}, {size(each.num_bytes)}, by {each.reason}{lost}")
    freed = size(sum(each.num_bytes for each in retired))
    verb = "would be retired" if dry_run else "retired"
    output.line(f"{plural(len(retired), 'segment')} {verb}, {freed}")
    return ExitCode.SOUND


def _retire(
    log: Path, max_bytes: int | None, max_age: float | None, output: Output, *, dry_run: bool
) -> list[Retirement]:
    is_log = log.is_dir() and bool(segment_paths(log))
    if not is_log and not (log.is_dir() and any(map(segment_paths, directories_in(log)))):
        raise CommandFailed(f"{log} contains no log; give a log directory, or a directory of logs")

    def name(error: OSError | LogError) -> None:
        output.unreadable(Path(str(getattr(error, "filename", None) or log)), error)

    def retire_now(*, dry_run: bool, on_trouble: Trouble = name) -> list[Retirement]:
        if is_log:
            return retire(log, max_bytes=max_bytes, max_age_seconds=max_age, dry_run=dry_run)
        return retire_logs(log, max_bytes=max_bytes, max_age_seconds=max_age, dry_run=dry_run, on_trouble=on_trouble)

    def plan() -> list[Retirement]:
        return retire_now(dry_run=True, on_trouble=ignore)

    if not dry_run:
        _make_snapshots(lambda each: log if is_log else log / each.log, plan)
    return retire_now(dry_run=dry_run)


def _make_snapshots(directory_of: Callable[[Retirement], Path], plan: Callable[[], list[Retirement]]) -> None:
    """Make the missing snapshots at which readers will begin after the deletion.

    A new snapshot counts towards the limits, so it may change which segments are deleted.
    """
    tried: set[tuple[str, str]] = set()
    while True:
        last = {each.log: each for each in plan()}.values()  # the last of each log that loses segments
        lacking = [each for each in last if not each.is_rest_verifiable and (each.log, each.segment) not in tried]
        if not lacking:
            return
        for each in lacking:
            tried.add((each.log, each.segment))
            # If this fails, the segment is retired anyway, and its record states that the rest is not verifiable.
            with contextlib.suppress(CommandFailed, LogError, OSError):
                write_snapshots(open_log(directory_of(each)), each.last_sequence + 1)
