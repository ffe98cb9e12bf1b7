"""Which request a person means, and in which log it is."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from kvledger.adapters.cli.fitting import CUT
from kvledger.adapters.cli.options import chosen_core, selection_of
from kvledger.adapters.cli.output import Output
from kvledger.adapters.exit_codes import CommandFailed
from kvledger.adapters.logs.index import index_for
from kvledger.adapters.logs.log import StoredLog, open_log
from kvledger.adapters.logs.selection import Selection
from kvledger.adapters.logs.sources import one_of
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e

_MAX_CANDIDATES = 20


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


def selected_one(arguments: argparse.Namespace, output: Output) -> tuple[StoredLog, Selection]:
    """The one log that the arguments mean, opened, with what they select of it.

    Raises:
        CommandFailed: they mean several.
    """
    if arguments.request is None:
        one_of(arguments.logs, arguments.log)
    return next(selected(arguments, output))


def opened_log(path: Path, arguments: argparse.Namespace, core: Core | None = None) -> StoredLog:
    """The log, opened as the arguments say; without `core` with one of its own."""
    core = core or chosen_core(arguments)
    return open_log(path, core, lenient=arguments.lenient, trusts_snapshots=arguments.trust_snapshots)


def find_request(arguments: argparse.Namespace, output: Output, core: Core) -> tuple[StoredLog, str]:
    """The log that has the one request whose id is the wanted one or begins with it, opened, and the whole id.

    Raises:
        CommandFailed: none has it, or several ids or logs could be meant.
    """
    wanted, logs = arguments.request.removesuffix(CUT), arguments.logs
    opened: list[StoredLog] = []
    known: dict[Path, dict[str, None]] = {}
    for path in logs:
        with output.apart_from_others(path):
            log = opened_log(path, arguments, core)
            known[log.path] = request_ids(log, wanted, output)
            opened.append(log)
    found = [(log, wanted) for log in opened if wanted in known[log.path]]
    found = found or [(log, name) for log in opened for name in known[log.path] if name.startswith(wanted)]
    if len(found) == 1:
        return found[0]
    names = list(dict.fromkeys(name for _, name in found))
    if len(names) == 1:
        where = ", ".join(str(log.path) for log, _ in found[-_MAX_CANDIDATES:])
        raise CommandFailed(f"{names[0]} is in {len(found)} logs; name one of them: {where}")
    kind = "several requests begin" if names else "no request begins"
    listed = names or list(dict.fromkeys(name for log in opened for name in known[log.path]))
    more = f" and {len(listed) - _MAX_CANDIDATES} more" if len(listed) > _MAX_CANDIDATES else ""
    whose = "they are" if names else "the log has" if len(opened) == 1 else "the logs have"
    message = f"{kind} with {wanted!r}; {whose}: {', '.join(listed[:_MAX_CANDIDATES]) or 'none'}{more}"
    raise CommandFailed(message)


def request_ids(log: StoredLog, beginning: str, output: Output) -> dict[str, None]:
    """The ids of the requests that begin so, or of all where none does, in the order of their arrival."""
    index = index_for(log, output, beginning)
    if index is not None:
        with contextlib.closing(index):
            if not index.contents.describes(log):
                output.remark(
                    f"the log has grown since its index was built: described up to event {index.contents.last_sequence}"
                )
            return dict.fromkeys(index.request_ids(beginning) or index.request_ids(""))
    known: dict[str, None] = {}
    with output.progress(log, "looking for the request"):
        for _, event in log.events():
            if isinstance(event, e.RequestEvent):
                known.setdefault(event.request_id)
    return known
