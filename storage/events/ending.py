"""How a log ended: closed, cut off, still open, or not known; and what is known to be missing at its end.

Judged from the files next to the segments: the record of the end (`log.end`), the writer's lock, and snapshots, each of
which has a segment. It must not know what events mean. A caller that has read the log says how far it goes
(`judge_ending`); for others the last segment is read (`read_ending`).
"""

from __future__ import annotations

import enum
import fcntl
import os
from typing import TYPE_CHECKING, Literal

import attrs

from kvledger.storage.events.damage import sequences
from kvledger.storage.events.end_record import END_RECORD_NAME, RecordedEnd, read_end_record
from kvledger.storage.events.files import open_for_reading, trouble_with
from kvledger.storage.events.reader import LogReader
from kvledger.storage.events.segment_file import SNAPSHOT_SUFFIX, first_sequence_of, segment_name, segment_paths
from kvledger.storage.events.writer_lock import LOCK_NAME

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "HowEnded",
    "LogEnding",
    "MissingEnd",
    "glance_at_ending",
    "is_being_written",
    "judge_ending",
    "read_ending",
]

_BEHIND_EVERYTHING = 1 << 62


class HowEnded(enum.StrEnum):
    """What became of the process that wrote a log, as far as the log is concerned."""

    CLOSED = "closed"
    CUT_OFF = "cut_off"
    """The process ended without closing the log: killed, crashed, or the machine lost power."""
    OPEN = "open"
    """A process holds the writer's lock."""
    UNKNOWN = "unknown"


@attrs.frozen
class MissingEnd:
    """Events that a log had taken, and that are not at its end.

    `missing_segment`: the newest segment is gone; `cut_segment`: frames behind its last one were written and are gone;
    `unwritten_events`: they could not be written, and the writer could not say so in the log itself.
    """

    kind: Literal["missing_segment", "cut_segment", "unwritten_events"]
    segment: str
    first_sequence: int
    num_events: int
    """At least; 0: how many is not known."""
    detail: str


@attrs.frozen
class LogEnding:
    """How a log ended."""

    how: HowEnded
    detail: str = ""
    """Why that is not known; or of a log that is open, what is the matter with it."""
    missing: MissingEnd | None = None
    """None also where that is not known."""
    contradiction: str = ""
    """The log's end is not its writer's: another chain hash than its record has, or more events than were recorded."""


def is_being_written(directory: Path) -> bool:
    """Whether a process holds the lock of the log in `directory`; False where that is not known.

    Asks for a shared lock and lets go of it at once: a writer that asks at that very moment asks again.
    """
    try:
        descriptor = open_for_reading(directory / LOCK_NAME)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def read_ending(directory: Path) -> LogEnding:
    """Judge the log in `directory`; reads no more than its last segment. Raises `LogError` and `OSError`."""
    was_open = is_being_written(directory)
    reader = LogReader(directory, _BEHIND_EVERYTHING)
    for _ in reader:
        pass
    return judge_ending(
        directory, reader.header.get("log_id"), reader.next_sequence, reader.head_hash, was_open=was_open
    )


def glance_at_ending(directory: Path) -> LogEnding:
    """Judge by the record alone, where the segment that it names is there and nothing waited; else as `read_ending`.

    Sees no frames that were cut off later. Reading a segment takes a second or more.
    """
    recorded = read_end_record(directory)
    was_open = is_being_written(directory)
    is_there = recorded is not None and any(each.name == recorded.segment for each in segment_paths(directory))
    if recorded is None or not (was_open or (is_there and recorded.end_sequence == recorded.next_sequence)):
        return read_ending(directory)
    return judge_ending(directory, recorded.log_id, recorded.next_sequence, None, was_open=was_open)


def judge_ending(
    directory: Path, log_id: object, next_sequence: int, head_hash: bytes | None, *, was_open: bool
) -> LogEnding:
    """Judge the log in `directory`, of which every intact frame was read.

    Args:
        directory: where the log is.
        log_id: the id in its headers.
        next_sequence: the sequence number behind its last event.
        head_hash: the chain hash there; None: not known.
        was_open: whether it was being written when reading began.
    """
    recorded = read_end_record(directory)
    if recorded is not None and recorded.log_id != log_id:
        recorded = None
    if was_open:
        waiting = "" if recorded is None or not recorded.num_unwritten else f"{_waiting(recorded)} and may be later"
        return LogEnding(HowEnded.OPEN, waiting)
    missing = _missing_segment(directory, next_sequence, recorded)
    if recorded is None:
        detail = trouble_with(directory / END_RECORD_NAME)
        detail = detail or f"the log has no record of its end ({END_RECORD_NAME}); copies and mirrors have none"
        return LogEnding(HowEnded.UNKNOWN, detail, missing)
    missing = missing or _missing_events(next_sequence, recorded)
    how, detail = HowEnded.CLOSED, ""
    if not recorded.is_closed:
        detail = trouble_with(directory / LOCK_NAME)
        how = HowEnded.UNKNOWN if detail else HowEnded.CUT_OFF
    contradiction = ""
    if next_sequence == recorded.next_sequence and head_hash is not None and head_hash.hex() != recorded.head_hash:
        contradiction = f"{END_RECORD_NAME} names chain hash {recorded.head_hash} behind event {next_sequence - 1}"
    elif recorded.expected_sequence is not None and recorded.expected_sequence < next_sequence:
        counted = recorded.expected_sequence - 1
        contradiction = f"{END_RECORD_NAME}: the writer had recorded {counted} events, this log has {next_sequence - 1}"
    return LogEnding(how, detail, missing, contradiction)


def _missing_segment(directory: Path, next_sequence: int, recorded: RecordedEnd | None) -> MissingEnd | None:
    """The newest segment that a file names and that is not there. The reader reports older ones."""
    named = {path.with_suffix(".kvlog").name: path.name for path in directory.glob(f"*{SNAPSHOT_SUFFIX}")}
    if recorded is not None:
        named[recorded.segment] = END_RECORD_NAME
    for segment in segment_paths(directory):
        named.pop(segment.name, None)
    for name in sorted(named):
        first_sequence = first_sequence_of(directory / name)
        if first_sequence is None or first_sequence < next_sequence or name != segment_name(first_sequence):
            continue
        num_events = 0 if recorded is None else max(0, recorded.end_sequence - next_sequence)
        lost = f"what came from sequence {next_sequence} on"
        if recorded is not None and num_events:
            lost = _from_to(next_sequence, recorded)
        detail = f"{named[name]} names it; no segment holds {lost}"
        return MissingEnd("missing_segment", name, next_sequence, num_events, detail)
    return None


def _missing_events(next_sequence: int, recorded: RecordedEnd) -> MissingEnd | None:
    num_events = recorded.end_sequence - next_sequence
    if num_events <= 0:
        return None
    if next_sequence < recorded.next_sequence:
        lost = _from_to(next_sequence, recorded)
        detail = f"cut at the end of a frame: no segment holds {lost}, which {END_RECORD_NAME} counts"
        return MissingEnd("cut_segment", recorded.segment, next_sequence, num_events, detail)
    return MissingEnd("unwritten_events", recorded.segment, next_sequence, num_events, _waiting(recorded))


def _waiting(recorded: RecordedEnd) -> str:
    if not recorded.num_unwritten:
        lost = _from_to(recorded.next_sequence, recorded)
        return f"the writer had recorded {lost} when it closed the log, and never wrote them"
    return f"{_from_to(recorded.next_sequence, recorded)} could not be written: {recorded.reason}"


def _from_to(first_sequence: int, recorded: RecordedEnd) -> str:
    return f"{'' if recorded.is_closed else 'at least '}{sequences(first_sequence, recorded.end_sequence)}"
