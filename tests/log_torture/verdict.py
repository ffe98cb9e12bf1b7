"""What must hold of a log whose writer was killed, whenever that was."""

from __future__ import annotations

from pathlib import Path

from kvledger.storage.events import FrameKind, HowEnded, LogReader, read_ending
from kvledger.storage.events.retirements import read_retirements
from kvledger.storage.events.segment_file import first_sequence_of, segment_paths
from kvledger.storage.events.snapshots import has_snapshot
from log_torture.writer import num_events_of, payload_of


def check_log(directory: Path, last_acknowledged: int) -> int:
    """Read the log as it was left; returns the last sequence number found.

    Verifies: everything acknowledged is there, or recorded as retired; every frame is one that was written; damage is a
    torn tail at most; how it ended is known, and nothing is said to be missing there; reading changes nothing.
    """
    if not any(directory.glob("*.kvlog")):
        assert last_acknowledged == 0, f"the log is gone, {last_acknowledged} events were acknowledged"
        return 0
    before = _bytes_of(directory)
    reader = LogReader(directory, settle_seconds=0)
    frames = list(reader)
    assert _bytes_of(directory) == before, "reading changed a file"
    expected = reader.retired[-1].last_sequence + 1 if reader.retired else 1
    for frame in frames:
        assert frame.first_sequence == expected, f"frame {frame.first_sequence} follows {expected - 1}"
        assert frame.payload == payload_of(expected), f"frame {expected} holds {frame.payload!r}"
        assert frame.num_events == num_events_of(expected)
        assert frame.kind is (FrameKind.GAP if expected % 11 == 7 else FrameKind.EVENTS)
        expected = frame.next_sequence
    assert expected > last_acknowledged, f"acknowledged up to {last_acknowledged}, found up to {expected - 1}"
    assert {damage.kind for damage in reader.damage} <= {"torn_tail"}, reader.damage
    ending = read_ending(directory)
    assert (ending.missing, ending.contradiction) == (None, ""), ending
    # A process that dies between two writes of a new log leaves a segment without a record, or half of one.
    assert ending.how in {HowEnded.CLOSED, HowEnded.CUT_OFF} or last_acknowledged == 0, ending
    return expected - 1


def _bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def assert_readable(directory: Path) -> None:
    """Assert that a log has its beginning, or a snapshot of its first segment, or a record that says what it lacks."""
    first = segment_paths(directory)[0]
    if first_sequence_of(first) != 1 and not has_snapshot(first):
        last = read_retirements(directory)[-1]
        assert last.last_sequence + 1 == first_sequence_of(first)
        assert not last.is_rest_verifiable
