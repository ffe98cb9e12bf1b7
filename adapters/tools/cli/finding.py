"""Which request a person means, and in which log it is."""

from __future__ import annotations

import argparse
import contextlib
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvledger.adapters.tools.cli.fitting import CUT
from kvledger.adapters.tools.cli.options import chosen_core, selection_of
from kvledger.adapters.tools.cli.output import Output
from kvledger.adapters.tools.exit_codes import CommandFailed
from kvledger.adapters.tools.logs.coverage import RequestPresence
from kvledger.adapters.tools.logs.index import index_for
from kvledger.adapters.tools.logs.log import StoredLog, open_log
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.logs.sources import one_of
from kvledger.lifecycle import Core, begins_as, logged_request_id
from kvledger.lifecycle import events as e

_MAX_CANDIDATES = 20
_MAX_COMPARED = 5_000
"""Of the last requests so many are compared with one that is not known: that takes less than a second."""


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
    """The log that has the one request whose id is the wanted one, or else has it as a whole, begins with it, has it.

    vLLM's front ends write something before the id that a client gives, and behind it: `cmpl-chat-1-0-8f3a1c5e` has
    `chat-1` as a whole, between hyphens. A long id is found by its hash, or by its beginning if vLLM has written
    something before it. Returns the log, opened, and the whole id in the log.

    Raises:
        CommandFailed: none has it, or several ids or logs could be meant.
    """
    given, logs = arguments.request.removesuffix(CUT), arguments.logs
    wanted, whole = logged_request_id(given), logged_request_id(arguments.request)
    opened: list[StoredLog] = []
    known: dict[Path, dict[str, None]] = {}
    for path in logs:
        with output.apart_from_others(path):
            log = opened_log(path, arguments, core)
            known[log.path] = request_ids(log, wanted, output)
            opened.append(log)
    have = [(log, name) for log in opened for name in known[log.path]]
    fits = (
        lambda name: name in {wanted, whole},
        lambda name: f"-{wanted}-" in f"-{name}-",
        lambda name: name.startswith(wanted),
        lambda name: wanted in name,
        lambda name: begins_as(name, given),
    )
    found = next(filter(None, ([each for each in have if fit(each[1])] for fit in fits)), [])
    if len(found) == 1:
        return found[0]
    names = sorted(dict.fromkeys(name for _, name in found), key=len)
    if len(names) == 1:
        where = ", ".join(str(log.path) for log, _ in found[-_MAX_CANDIDATES:])
        raise CommandFailed(f"{names[0]} is in {len(found)} logs; name one of them: {where}")
    if names:
        raise CommandFailed(f"{wanted!r} is in the ids of several requests, the shortest first: {_first_of(names)}")
    last = list(dict.fromkeys(name for _, name in reversed(have)))
    nearest = _nearest(wanted, last)
    offered = f"did you mean: {_first_of(nearest)}" if nearest else f"the last ones are: {_first_of(last) or 'none'}"
    raise CommandFailed(f"no request has {wanted!r} in its id; {offered}")


def _nearest(wanted: str, names: Sequence[str]) -> list[str]:
    """Those that have more than half of it in one piece, the nearest first."""
    matcher = difflib.SequenceMatcher(None, "", wanted, autojunk=False)
    pieces = {}
    for name in names[:_MAX_COMPARED]:
        matcher.set_seq1(name)
        pieces[name] = matcher.find_longest_match().size
    near = [name for name, size in pieces.items() if 2 * size > len(wanted)]
    return sorted(near, key=lambda name: (-pieces[name], len(name)))


def _first_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_CANDIDATES} more" if len(names) > _MAX_CANDIDATES else ""
    return f"{', '.join(names[:_MAX_CANDIDATES])}{more}"


def request_ids(log: StoredLog, part: str, output: Output) -> dict[str, None]:
    """The ids of the requests that contain it, or of all where none does, in the order of their arrival."""
    index = index_for(log, output, part)
    if index is not None:
        with contextlib.closing(index):
            if not index.contents.describes(log):
                output.remark(
                    f"the log has grown since its index was built: described up to event {index.contents.last_sequence}"
                )
            return dict.fromkeys(index.request_ids(part) or index.request_ids(""))
    known: dict[str, None] = {}
    with output.progress(log, "looking for the request"):
        for _, event in log.events():
            if isinstance(event, e.RequestEvent):
                known.setdefault(event.request_id)
    return known
