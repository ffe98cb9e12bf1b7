"""How a log ended, and which events are known to be missing at its end.

The evidence is the end record (`log.end`), the writer's lock and the snapshots. A snapshot without its segment shows
that the segment is missing. Callers that have read the log use `judge_ending`; `read_ending` reads the last segment
itself. This module must not know what events mean.
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
    """How a log ended, or that it is still being written."""

    CLOSED = "closed"
    CUT_OFF = "cut_off"
    """The process ended without closing the log: it was killed, it crashed, or the machine lost power."""
    OPEN = "open"
    """A process holds the writer's lock."""
    UNKNOWN = "unknown"


@attrs.frozen
class MissingEnd:
    """Events that the writer accepted and that are missing at the log's end.

    `kind` is `missing_segment` if the newest segment is gone, and `cut_segment` if frames at the end of `segment` are
    gone. It is `unwritten_events` if the writer could write neither the events nor a GAP frame for them.
    """

    kind: Literal["missing_segment", "cut_segment", "unwritten_events"]
    segment: str
    first_sequence: int
    num_events: int
    """Minimum number of missing events; 0: unknown."""
    detail: str


@attrs.frozen
class LogEnding:
    """How a log ended."""

    how: HowEnded
    detail: str = ""
    """Reason why `how` is `UNKNOWN`. For an open log, the events that could not be written so far."""
    missing: MissingEnd | None = None
    """None: no event is known to be missing."""
    contradiction: str = ""
    """Difference between the log and its end record, in words. The log has another chain hash, or more events than the
    end record counts. Empty: no difference was found."""


def is_being_written(directory: Path) -> bool:
    """Whether a process holds the writer's lock of the log in `directory`. False if the lock cannot be checked.

    Takes a shared lock for a moment. A writer that cannot take its lock at that moment tries again.
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
    """Read the last segment of the log in `directory`; return how the log ended. Raises `LogError` and `OSError`."""
    was_open = is_being_written(directory)
    reader = LogReader(directory, _BEHIND_EVERYTHING)
    for _ in reader:
        pass
    return judge_ending(
        directory, reader.header.get("log_id"), reader.next_sequence, reader.head_hash, was_open=was_open
    )


def glance_at_ending(directory: Path) -> LogEnding:
    """Return how the log ended, from its end record alone if possible, else with the slower `read_ending`.

    The end record is enough if the log is being written. It is also enough if it counts no unwritten events and the
    segment that it names exists. This function then does not notice frames that are missing at the end of the log.
    `read_ending` takes a second or more.
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
    """Return how the log in `directory` ended, for a caller that has read all of its intact frames.

    `log_id` is from the log's headers. `next_sequence` and `head_hash` are the sequence number and the chain hash after
    the last intact frame. None for `head_hash`: unknown, so it is not compared. `was_open` is whether the log was being
    written when reading began.
    """
    recorded = read_end_record(directory)
    if recorded is not None and recorded.log_id != log_id:
        recorded = None
    if was_open:
        waiting = (
            "" if recorded is None or not recorded.num_unwritten else f"{_waiting(recorded)}; the writer tries again"
        )
        return LogEnding(HowEnded.OPEN, waiting)
    missing = _missing_segment(directory, next_sequence, recorded)
    if recorded is None:
        detail = trouble_with(directory / END_RECORD_NAME)
        detail = detail or f"the log has no record of its end ({END_RECORD_NAME}); copies and mirrors of logs have none"
        return LogEnding(HowEnded.UNKNOWN, detail, missing)
    missing = missing or _missing_events(next_sequence, recorded)
    how, detail = HowEnded.CLOSED, ""
    if not recorded.is_closed:
        detail = trouble_with(directory / LOCK_NAME)
        how = HowEnded.UNKNOWN if detail else HowEnded.CUT_OFF
    contradiction = ""
    if next_sequence == recorded.next_sequence and head_hash is not None and head_hash.hex() != recorded.head_hash:
        contradiction = (
            f"{END_RECORD_NAME} has another chain hash after event {next_sequence - 1} than the log: "
            f"{recorded.head_hash} instead of {head_hash.hex()}"
        )
    elif recorded.expected_sequence is not None and recorded.expected_sequence < next_sequence:
        counted = recorded.expected_sequence - 1
        contradiction = (
            f"{END_RECORD_NAME}: the writer had recorded {counted} events, but this log has {next_sequence - 1}"
        )
    return LogEnding(how, detail, missing, contradiction)


def _missing_segment(directory: Path, next_sequence: int, recorded: RecordedEnd | None) -> MissingEnd | None:
    """Return the first missing segment after the log's end, if a snapshot or the end record names one, else None."""
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
        lost = f"the events from sequence {next_sequence} on"
        if recorded is not None and num_events:
            lost = _from_to(next_sequence, recorded)
        detail = f"{named[name]} names a later segment, which is missing together with {lost}"
        return MissingEnd("missing_segment", name, next_sequence, num_events, detail)
    return None


def _missing_events(next_sequence: int, recorded: RecordedEnd) -> MissingEnd | None:
    num_events = recorded.end_sequence - next_sequence
    if num_events <= 0:
        return None
    if next_sequence < recorded.next_sequence:
        lost = _from_to(next_sequence, recorded)
        detail = f"the log is cut at the end of a frame and lacks {lost}, which {END_RECORD_NAME} counts"
        return MissingEnd("cut_segment", recorded.segment, next_sequence, num_events, detail)
    return MissingEnd("unwritten_events", recorded.segment, next_sequence, num_events, _waiting(recorded))


def _waiting(recorded: RecordedEnd) -> str:
    if not recorded.num_unwritten:
        lost = _from_to(recorded.next_sequence, recorded)
        return f"the writer had recorded {lost} when it closed the log, but they never reached the log"
    return f"{_from_to(recorded.next_sequence, recorded)} could not be written: {recorded.reason}"


def _from_to(first_sequence: int, recorded: RecordedEnd) -> str:
    return f"{'' if recorded.is_closed else 'at least '}{sequences(first_sequence, recorded.end_sequence)}"
