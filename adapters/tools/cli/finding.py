"""Which request a person means, and in which log it is."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from kvledger.adapters.tools.cli.options import chosen_core, selection_of
from kvledger.adapters.tools.cli.output import Output
from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode, gravest
from kvledger.adapters.tools.logs.coverage import RequestPresence
from kvledger.adapters.tools.logs.finding import one_request, request_ids
from kvledger.adapters.tools.logs.index import index_for
from kvledger.adapters.tools.logs.log import StoredLog, open_log
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.sources import one_of
from kvledger.lifecycle import Core


def selected(arguments: argparse.Namespace, output: Output) -> Iterator[tuple[StoredLog, Selection]]:
    """Each log that the arguments mean, opened, with what they select of it. A request is in one of the logs."""
    core = chosen_core(arguments)
    if arguments.request is not None:
        log, request_id = find_request(arguments, output, core)
        yield log, selection_of(arguments, log, output, request_id)
        return
    for path in arguments.logs:
        with output.apart_from_others(path):
            log = opened_log(path, arguments, core)
            yield log, selection_of(arguments, log, output)


def foldable(arguments: argparse.Namespace, output: Output) -> list[tuple[StoredLog, Selection]]:
    """The same, without the logs whose configuration is lost. If there are several logs, these are named.

    Raises:
        CommandFailed: none is left.
    """
    logs = []
    for log, selection in selected(arguments, output):
        with output.apart_from_others(log.path):
            log.configuration  # noqa: B018 -- it raises
            logs.append((log, selection))
    if not logs:
        raise CommandFailed("no log could be read: see above", gravest(output.failures) or ExitCode.DAMAGED)
    return logs


def lives_in(log: StoredLog, selection: Selection, output: Output) -> bool:
    """Whether the selected request lived in the selected part of the log; True if none is selected."""
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


def selected_one(arguments: argparse.Namespace, output: Output) -> tuple[StoredLog, Selection]:
    """The one log that the arguments mean, opened, with what they select of it.

    Raises:
        CommandFailed: they mean several.
    """
    if arguments.request is None:
        arguments.logs = [one_of(arguments.logs, arguments.log)]
        output.has_many_logs = False
    return next(selected(arguments, output))


def opened_log(path: Path, arguments: argparse.Namespace, core: Core | None = None) -> StoredLog:
    """The log, opened as the arguments say; without `core` with one of its own."""
    core = core or chosen_core(arguments)
    return open_log(path, core, lenient=arguments.lenient, trusts_snapshots=arguments.trust_snapshots)


def find_request(arguments: argparse.Namespace, output: Output, core: Core) -> tuple[StoredLog, str]:
    """The log that has the one request that is meant, opened, and the whole id in the log; see `one_request`.

    Raises:
        CommandFailed: none has it, or several ids or logs could be meant.
    """
    known: list[tuple[StoredLog, dict[str, None]]] = []
    for path in arguments.logs:
        with output.apart_from_others(path):
            log = opened_log(path, arguments, core)
            known.append((log, request_ids(log, arguments.request, output)))
    return one_request(known, arguments.request)
