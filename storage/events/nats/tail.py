"""Read a log's records from disk, after any given record, even while the log grows. Takes no lock, writes nothing.

`LogTail` returns only complete records that continue the record before. It checks their CRC, sequence number and
chain hash. It finds damage with `LogReader`, like ``kvledger verify``. This module must not know the network.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

import attrs
import msgspec

from kvledger.storage.events.frames import frame_bytes
from kvledger.storage.events.nats.errors import LogForked
from kvledger.storage.events.nats.messages import Record, record_of_frame
from kvledger.storage.events.reader import Damage, LogReader
from kvledger.storage.events.retirements import read_retirements, retired_between
from kvledger.storage.events.segment_bytes import SegmentBytes, num_written_bytes
from kvledger.storage.events.segment_file import first_sequence_of, read_header, segment_name, segment_paths
from kvledger.storage.events.store import LogDamaged, LogError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

__all__ = ["LogTail", "num_bytes_behind"]

_LOG_ID: Final = re.compile(r"[0-9a-f]{32}")


class LogTail:
    """The records of one log, in order.

    Call `read` until it returns no records. `trouble` then returns the damage that prevents further reading, if any.

    `last` is the record that was read last, or that was given to `seek`. Set it to an earlier record to continue after
    that record. `lost` has events that were retired before they could be read: first → last sequence number.
    """

    def __init__(self, directory: Path) -> None:
        """Prepare to read the log in `directory`.

        Raises:
            LogError: the directory holds no log, or no segment has a readable header.
        """
        self.directory: Final = directory
        self.log_id: Final = _log_id(directory)
        self.lost: dict[int, int] = {}
        self.last: Record | None = None

    @property
    def next_sequence(self) -> int:
        """Sequence number of the first event that is not read yet."""
        return 1 if self.last is None else self.last.next_sequence

    def seek(self, last: Record | None) -> None:
        """Continue after `last`, a record that is in the stream. None: begin with the first existing segment.

        Raises:
            LogForked: the file has other bytes at the place of `last`, or is too short to contain `last`.
        """
        self.last = last
        if last is None:
            return
        segment = self.directory / last.segment
        try:
            with SegmentBytes(segment) as data:
                stored = data.read(last.offset, len(last.data))
        except FileNotFoundError:
            return  # The segment was retired; `_successor` finds the next one.
        if stored != last.data:
            num_missing = len(last.data) - len(stored)
            found = f"ends {num_missing} bytes too early" if last.data.startswith(stored) else "has other bytes there"
            raise LogForked(
                f"{segment}: the stream holds {last}, but the file {found}. The log lost data (a power cut with "
                "durability 'os' can do that) or was rewritten. The stream keeps its data; start a new log"
            )

    def read(self, max_records: int, max_bytes: int) -> list[Record]:
        """Return the next complete records, until one of the limits is reached.

        Returns at least one record if there is one. The list is empty if no complete record follows.
        """
        records: list[Record] = []
        for record in self._records():
            self.last = record
            records.append(record)
            max_bytes -= len(record.data)
            if len(records) == max_records or max_bytes <= 0:
                break
        return records

    def trouble(self) -> Damage | None:
        """Return the damage that prevents further reading. None if the log ends here or has grown meanwhile.

        If the file is being written, a ``torn_tail`` may be a frame that is not complete yet. If bytes follow the last
        record, this method reads the record's segment again from its start.

        Raises:
            LogForked: the file no longer has the bytes that were read.
            LogError: the log is gone.
        """
        self.seek(self.last)
        if self.last is not None and num_bytes_behind(self.directory, self.last) == 0:
            return None
        reader = LogReader(self.directory, from_sequence=1 if self.last is None else self.last.first_sequence)
        for frame in reader:
            if frame.first_sequence >= self.next_sequence:
                break
        segments = _segments(self.directory)
        for damage in reader.damage:
            is_before = self.last is not None and (damage.segment, damage.offset) < (self.last.segment, self.last.end)
            # The oldest segments are gone: `read` continues after the gap and records it in `lost`.
            is_retired = damage.kind == "missing_segment" and segments and damage.segment == segments[0].name
            if not is_before and not is_retired:
                return damage
        return None

    def _records(self) -> Iterator[Record]:
        """Yield the records after `last`. The caller must set `last` to each record before it asks for the next one."""
        while True:
            # Looked up first: a segment with a successor is no longer written to.
            successor = self._successor()
            if self.last is not None and not (yield from self._frames(self.last)):
                return
            header = None if successor is None else self._header(successor)
            if header is None:
                return
            yield header

    def _frames(self, last: Record) -> Generator[Record, None, bool]:
        """Yield the frames after `last` in its segment. Return whether the segment ends directly after these frames."""
        try:
            data = SegmentBytes(self.directory / last.segment)
        except FileNotFoundError:
            return True
        with data:
            end = last.end
            for offset, frame in data.frames(end, last.next_sequence, last.chain_hash):
                end = offset + frame_bytes(frame)
                yield record_of_frame(last.segment, offset, data.read(offset, frame_bytes(frame)), frame)
            return end >= data.num_bytes  # Otherwise bytes follow that are not a frame, or not a complete one yet.

    def _successor(self) -> Path | None:
        """Return the segment to read after the segment of `last`; None: there is none.

        In an intact log, this segment begins with `next_sequence`.
        """
        if self.last is not None:
            expected = self.directory / segment_name(self.last.next_sequence)
            if expected.name != self.last.segment and os.path.lexists(expected):
                return expected
            if os.path.lexists(self.directory / self.last.segment):
                return None  # Later segments come after a gap, which `trouble` reports.
        segments = _segments(self.directory)
        if not segments or (self.last is not None and segments[0].name <= self.last.segment):
            return None
        return segments[0]

    def _header(self, segment: Path) -> Record | None:
        """Return the record of the segment's header block; None if the block is damaged or does not continue `last`."""
        try:
            header = read_header(segment)
            with SegmentBytes(segment) as data:
                block = data.read(0, header.num_bytes)
        except (LogDamaged, FileNotFoundError):
            return None
        first, expected = header.first_sequence, self.next_sequence
        if header.log_id != self.log_id or first != first_sequence_of(segment) or first < expected:
            return None
        if first == expected:
            does_follow = self.last is None or header.previous_head_hash == self.last.chain_hash
            return Record(segment.name, 0, block, first, first, header.chain_hash) if does_follow else None
        # The segments before this one were deleted.
        self.lost[expected] = first - 1
        retired = _retirement(self.directory, self.log_id, expected, first)
        return Record(segment.name, 0, block, first, first, header.chain_hash, retired)


def _retirement(directory: Path, log_id: str, first_sequence: int, end_sequence: int) -> str:
    """Return one retirement, as JSON, that covers all events from `first_sequence` up to before `end_sequence`.

    The retirement is merged from entries of `retired.jsonl`. "": the entries do not cover all of these events.
    """
    chain = retired_between(read_retirements(directory), log_id, first_sequence, end_sequence)
    if not chain:
        return ""
    whole = attrs.evolve(
        chain[-1],
        segment=chain[0].segment,
        first_sequence=chain[0].first_sequence,
        previous_head_hash=chain[0].previous_head_hash,
        num_bytes=sum(each.num_bytes for each in chain),
    )
    return msgspec.json.encode(whole).decode()


def num_bytes_behind(directory: Path, last: Record | None) -> int:
    """Return how many uncompressed bytes of the log are after the record `last`. If `last` is None, all bytes count."""
    total = 0
    for segment in _segments(directory):
        if last is None or segment.name >= last.segment:
            total += _size(segment) - (0 if last is None or segment.name > last.segment else last.end)
    return max(0, total)


def _log_id(directory: Path) -> str:
    reason = "the directory holds no log segment (*.kvlog)"
    for segment in _segments(directory):
        try:
            log_id = read_header(segment).log_id
            if not _LOG_ID.fullmatch(log_id):
                raise LogError(f"{segment}: {log_id!r} is not a log id of 32 hex digits")
            return log_id
        except (LogDamaged, FileNotFoundError) as error:
            reason = f"no segment has a readable header: {error}"
    raise LogError(f"{directory}: {reason}")


def _segments(directory: Path) -> list[Path]:
    try:
        return segment_paths(directory)
    except FileNotFoundError:
        return []


def _size(path: Path) -> int:
    try:
        return num_written_bytes(path)
    except FileNotFoundError:
        return 0
