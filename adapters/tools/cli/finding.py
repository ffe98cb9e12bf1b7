"""Finds the logs that the argument LOG names, and the request that the argument REQUEST names, with its log."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvledger.adapters.core import composed_core
from kvledger.adapters.tools.cli.options import Reading, may_be_request, selection_of
from kvledger.adapters.tools.cli.output import Output
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode, gravest
from kvledger.adapters.tools.logs.coverage import RequestPresence
from kvledger.adapters.tools.logs.finding import one_request, request_ids
from kvledger.adapters.tools.logs.index import index_for
from kvledger.adapters.tools.logs.log import StoredLog, open_log
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.sources import engine_starts, find_logs, one_of, started_with
from kvledger.adapters.tools.logs.streams import shown_log
from kvledger.adapters.tools.logs.visible import remark
from kvledger.adapters.units import plural
from kvledger.lifecycle import Core
from kvledger.storage.events.files import refused_link


def logs_of(reading: Reading, output: Output, *, with_workers: bool = False) -> list[Path]:
    """Return the logs that LOG names, ordered by engine start, the newest start last.

    With `--newest`, return only the scheduler's log of the newest engine start. With `--newest` and `with_workers`,
    return the logs of this start's workers, too, before the scheduler's log.

    Raises:
        CommandFailed: LOG names no log, or REQUEST is a log.
    """
    log, request = reading.log, reading.request
    if request and os.path.lexists(request):
        if isinstance(log, Path) and may_be_request(log):
            raise CommandFailed(f"give LOG before REQUEST: {shown_log(request)} {log}")
        raise CommandFailed(f"{shown_log(log)} and {request} are two logs; give the directory that contains both")
    if request and isinstance(log, Path) and may_be_request(log) and may_be_request(Path(request)):
        raise CommandFailed(
            f"{shown_log(log)} does not exist; give the LOG (a log directory or a *.kvlog file) and the REQUEST in it"
        )
    logs = find_logs(log, reading.mirror, newest=reading.newest)
    if reading.newest and len(logs) > 1:
        logs = _newest(logs, reading, with_workers=with_workers)
    output.has_many_logs = len(logs) > 1
    return logs


def _newest(logs: Sequence[Path], reading: Reading, *, with_workers: bool) -> list[Path]:
    for link in filter(Path.is_symlink, logs):
        remark(str(refused_link(link)))
    starts = engine_starts(logs)
    newest = starts[-1]
    if newest.scheduler is None:
        remark(
            f"the newest of {len(starts)} engine starts in {reading.log} has no scheduler log, only "
            f"{plural(len(newest.workers), 'log')} of workers: the engine failed before vLLM created its scheduler, or "
            "the scheduler log was removed; `kvledger ls` lists the earlier starts"
        )
        return newest.logs
    of_what = "logs" if len(starts) == len(logs) else "logs (the scheduler's log of the newest engine start)"
    remark(f"reading {newest.scheduler}, the newest of {len(logs)} {of_what} in {reading.log}")
    others = started_with(newest, starts)
    if others:
        named = ", ".join(str(other.main) for other in others)
        remark(f"the server has {len(others) + 1} engines or connectors with logs; these logs are not read: {named}")
    return newest.logs if with_workers else [newest.scheduler]


def selected(
    reading: Reading, output: Output, logs: Sequence[Path] | None = None, core: Core | None = None
) -> Iterator[tuple[StoredLog, Selection]]:
    """Yield each opened log with its selected part. With REQUEST, yield only the log that has this request.

    Without `logs`, read the logs that LOG names. Without `core`, use the standard core.
    """
    logs = logs_of(reading, output) if logs is None else logs
    core = core or composed_core((), ())
    if reading.request is not None:
        log, request_id = find_request(logs, reading, output, core)
        yield log, selection_of(reading, log, output, request_id)
        return
    for path in logs:
        with output.apart_from_others(path):
            log = opened_log(path, reading, core)
            yield log, selection_of(reading, log, output)


def foldable(
    reading: Reading, output: Output, logs: Sequence[Path] | None = None, core: Core | None = None
) -> list[tuple[StoredLog, Selection]]:
    """Return what `selected` yields, but leave out the logs whose configuration is lost.

    Raises:
        CommandFailed: no log remains.
    """
    found = []
    for log, selection in selected(reading, output, logs, core):
        with output.apart_from_others(log.path):
            log.configuration  # noqa: B018 -- raises if it is lost
            found.append((log, selection))
    if not found:
        raise CommandFailed(
            "no log could be read; the messages above have the reasons", gravest(output.failures) or ExitCode.DAMAGED
        )
    return found


def lives_in(log: StoredLog, selection: Selection, output: Output) -> bool:
    """Whether the selected request lived in the selected part of the log. True if no request is selected."""
    if selection.request_id is None:
        return True
    index = index_for(log, output, selection.request_id)
    if index is not None:
        with contextlib.closing(index):
            return any(
                span.last_sequence >= selection.first_sequence and not selection.is_over(span.first_sequence)
                for span in index.spans(selection.request_id)
            )
    presence = RequestPresence(selection)
    for batch in log.batches(selection.last_sequence):
        presence.take(batch.numbered())
    return presence.is_found


def selected_one(reading: Reading, output: Output, core: Core | None = None) -> tuple[StoredLog, Selection]:
    """Open the one log that LOG and REQUEST name. Return it with its selected part.

    Raises:
        CommandFailed: LOG and REQUEST name no log, or several logs.
    """
    logs = logs_of(reading, output)
    if reading.request is None:
        logs = [one_of(logs, reading.log)]
        output.has_many_logs = False
    return next(selected(reading, output, logs, core))


def opened_log(path: Path, reading: Reading, core: Core) -> StoredLog:
    """Open the log at `path`. The options `--lenient` and `--trust-snapshots` are in `reading`."""
    return open_log(path, core, lenient=reading.lenient, trusts_snapshots=reading.trust_snapshots)


def find_request(logs: Sequence[Path], reading: Reading, output: Output, core: Core) -> tuple[StoredLog, str]:
    """Find the request that REQUEST names. Return the opened log that has it, and its whole id.

    Raises:
        CommandFailed: no request or several requests fit REQUEST.
    """
    asked = reading.request or ""
    known: list[tuple[StoredLog, dict[str, None]]] = []
    for path in logs:
        with output.apart_from_others(path):
            log = opened_log(path, reading, core)
            known.append((log, request_ids(log, asked, output)))
    return one_request(known, asked)
