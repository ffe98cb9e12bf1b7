"""Finds the request that an id or a part of an id means, in one or several logs."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Sequence

from kvledger.adapters.tools.exit_codes import CommandFailed
from kvledger.adapters.tools.logs.index import index_for
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.adapters.tools.logs.progress import Progress
from kvledger.lifecycle import begins_as, logged_request_id
from kvledger.lifecycle import events as e

_MAX_CANDIDATES = 20
_MAX_COMPARED = 5_000
"""Most recent request ids to compare with an unknown one. Comparing so many takes less than a second."""


class RequestUnknown(CommandFailed):
    """No request id contains the given text."""


class RequestAmbiguous(CommandFailed):
    """Several ids contain the given text, or several logs contain the id."""


def one_request(known: Sequence[tuple[StoredLog, Iterable[str]]], given: str) -> tuple[StoredLog, str]:
    """Find the one request that the text `given` means, and return its log and its whole id in that log.

    Five comparisons are tried in this order, until one fits a request:

    1. The id equals the text.
    2. The text is a whole part of the id, between hyphens. vLLM's front ends write something before and after the
       client's id: in `cmpl-chat-1-0-8f3a1c5e`, the client's id is `chat-1`.
    3. The id begins with the text.
    4. The id contains the text.
    5. As in 4, but without hashes. Logs cut a long id and append a hash of the whole id. For 1 to 4, a long `given` is
       cut in the same way. If vLLM wrote something before the client's id, the two hashes differ.

    Args:
        known: each log with the ids of its requests, in the order of their arrival.
        given: an id or a part of an id.

    Raises:
        RequestUnknown: no id fits.
        RequestAmbiguous: several ids or logs fit.
    """
    wanted = logged_request_id(given)
    have = [(log, name) for log, names in known for name in names]
    fits = (
        lambda name: name == wanted,
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
        raise RequestAmbiguous(f"{names[0]} is in {len(found)} logs; name one of them: {where}")
    if names:
        raise RequestAmbiguous(
            f"{wanted!r} is in the ids of several requests, the shortest first: {_first_of(names)}; give more of the id"
        )
    last = list(dict.fromkeys(name for _, name in reversed(have)))
    nearest = _nearest(wanted, last)
    offered = f"did you mean: {_first_of(nearest)}" if nearest else f"the last requests: {_first_of(last) or 'none'}"
    remedy = "`kvledger show LOG --limit 0` lists all requests"
    raise RequestUnknown(f"no request has {wanted!r} in its id; {offered}; {remedy}")


def request_ids(log: StoredLog, given: str, output: Progress) -> dict[str, None]:
    """Return the request ids that may fit the given text, in the order of arrival.

    The result has at least every id that contains the text. If no id contains the text, the result has all ids.
    """
    part = logged_request_id(given)
    index = index_for(log, output, part)
    if index is not None:
        with contextlib.closing(index):
            if not index.contents.describes(log):
                output.remark(
                    "the log has grown since its index was built: requests are "
                    f"described up to event {index.contents.last_sequence}"
                )
            return dict.fromkeys(index.request_ids(part) or index.request_ids(""))
    known: dict[str, None] = {}
    with output.progress(log, "looking for the request"):
        for _, event in log.events():
            if isinstance(event, e.RequestEvent):
                known.setdefault(event.request_id)
    return known


def _nearest(wanted: str, names: Sequence[str]) -> list[str]:
    """Return the names that contain more than half of `wanted` in one piece, the name with the longest piece first."""
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
