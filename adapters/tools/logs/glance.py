"""Describes a log without folding it, from its header, its files, its end record and its newest segment.

In a large log, a glance does not see damage in older segments; `kvledger verify` does. This module must not judge a
log.
"""

from __future__ import annotations

from pathlib import Path

import attrs

from kvledger.adapters.core import available_extensions
from kvledger.adapters.tools.exit_codes import CommandFailed, unreadable_text
from kvledger.adapters.tools.logs.clock import Clock
from kvledger.lifecycle import Core, CoreError
from kvledger.lifecycle import events as e
from kvledger.lifecycle.codec import CodecError, EventDecoder
from kvledger.storage.events import FrameKind, LogEnding, LogError, LogReader, is_being_written, judge_ending
from kvledger.storage.events.files import num_bytes_of, refused_link
from kvledger.storage.events.segment_bytes import num_written_bytes
from kvledger.storage.events.segment_file import SNAPSHOT_SUFFIX, first_sequence_of, segment_paths

_COUNTED_BYTES = 4 << 20
"""Size in bytes from which the requests of a log are not counted; `kvledger show` counts them."""


@attrs.frozen
class Glance:
    """One log in the list of `kvledger ls`."""

    path: Path
    log_id: str = ""
    written_by: str = ""
    """kvledger's version, then the recorded connector and the worker's rank if the header has them."""
    model: str = ""
    opened_at_unix_ns: int | None = None
    ended_at_unix_ns: int | None = None
    """Time of the last event."""
    num_events: int = 0
    """Events that were written, including events that were retired."""
    num_requests: int | None = None
    """Requests that arrived. None: not counted, because the log is large, is damaged, has no events, has lost its
    beginning, cannot be decoded, or is a worker's log."""
    nothing_checked: str = ""
    """Reason why no event of the log can be checked, as far as a glance shows; empty if events can be checked."""
    num_bytes: int = 0
    ending: LogEnding | None = None
    damage: tuple[str, ...] = ()
    """Kinds of damage in the segments that were read."""
    unreadable: str = ""
    """Reason why the log cannot be read; empty if it can be read."""


def glance_at(path: Path) -> Glance:
    """Describe a log. If the log cannot be read, `unreadable` has the reason, and no error is raised."""
    try:
        return _glance_at(path)
    except OSError as error:
        return Glance(path, unreadable=unreadable_text(error))
    except (CommandFailed, CodecError, CoreError, LogError) as error:
        return Glance(path, unreadable=str(error))


def _glance_at(path: Path) -> Glance:
    if path.is_symlink():
        raise refused_link(path)
    files = segment_paths(path) if path.is_dir() else [path]
    num_bytes = sum(map(num_bytes_of, files))
    was_open = is_being_written(path)
    counts = num_bytes < _COUNTED_BYTES and sum(map(num_written_bytes, files)) < _COUNTED_BYTES
    reader = LogReader(path, 1 if counts or not files else first_sequence_of(files[-1]) or 1)
    header, last, arrivals = reader.header, None, 0
    if not header:
        return Glance(path, num_bytes=num_bytes, unreadable="no segment has a readable header")
    decoder = _decoder(header)
    for frame in reader:
        if frame.kind is FrameKind.EVENTS:
            last = frame.payload
            if counts and decoder is not None:
                arrivals += sum(isinstance(event, e.RequestArrived) for event in decoder.decode_frame(last).events)
    ended_ns = None
    if last is not None and decoder is not None:
        times = [getattr(event, "time_ns", None) for event in decoder.decode_frame(last).events]
        ended_ns = max((time_ns for time_ns in times if time_ns is not None), default=None)
    clock = Clock(header)
    first = (files and first_sequence_of(files[0])) or 1
    nothing_checked = ""
    if reader.next_sequence == 1:
        nothing_checked = "no event"
    elif first > 1 and not (path.is_dir() and any(path.glob(f"*{SNAPSHOT_SUFFIX}"))):
        nothing_checked = "beginning missing"
    is_counted = counts and decoder is not None and first == 1 and not reader.damage and "worker_rank" not in header
    return Glance(
        path,
        log_id=str(header.get("log_id", "")),
        written_by=_written_by(header),
        model=str(header.get("model", "")),
        opened_at_unix_ns=clock.unix_ns(0),
        ended_at_unix_ns=clock.unix_ns(ended_ns),
        num_events=reader.next_sequence - 1,
        num_requests=arrivals if is_counted and reader.next_sequence > 1 else None,
        nothing_checked=nothing_checked,
        num_bytes=num_bytes,
        ending=judge_ending(path, header.get("log_id"), reader.next_sequence, reader.head_hash, was_open=was_open)
        if path.is_dir()
        else None,
        damage=tuple(dict.fromkeys(str(damage.kind) for damage in reader.damage)),
    )


def _decoder(header: dict[str, object]) -> EventDecoder | None:
    """Return a decoder, to find times and requests; None if this installation cannot decode the events."""
    try:
        return EventDecoder(Core.standard().reading(header, available_extensions()), header, lenient=True)
    except (CodecError, CoreError):
        return None


def _written_by(header: dict[str, object]) -> str:
    rank = header.get("worker_rank")
    parts = [str(header.get("kvledger_version", ""))]
    parts += [f"recording {header['connector']}"] if header.get("connector") else []
    return ", ".join([*parts, *([] if rank is None else [f"worker {rank}"])])
