"""The records of a log on disk, from any place on, also while the log is written. Never locks, never writes.

It hands out what is whole and follows from what it handed out before: CRC, sequence and chain are checked. What is
wrong is named by the reader (`LogReader`), so a shipper and ``verify`` use the same words. Knows no network.
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
    """One log's records in order. `read` until it returns nothing; `trouble` says whether that is the end.

    `last` is the record read last, or the one given to `seek`; set it to one that was read to read again what follows.
    `lost` collects the sequences (first -> last) that were retired before they could be read.
    """

    def __init__(self, directory: Path) -> None:
        """Look at the log in `directory`.

        Raises:
            LogError: it holds no log, or none of its segments has a readable header.

        """
        self.directory: Final = directory
        self.log_id: Final = _log_id(directory)
        self.lost: dict[int, int] = {}
        self.last: Record | None = None

    @property
    def next_sequence(self) -> int:
        """The first sequence number that was not read yet."""
        return 1 if self.last is None else self.last.next_sequence

    def seek(self, last: Record | None) -> None:
        """Continue behind `last`, which the stream holds; None: begin with the first segment there is.

        Raises:
            LogForked: the files have other bytes there, or end before.

        """
        self.last = last
        if last is None:
            return
        segment = self.directory / last.segment
        try:
            with SegmentBytes(segment) as data:
                stored = data.read(last.offset, len(last.data))
        except FileNotFoundError:
            return  # Retired by now; what follows is found by `_successor`, and must fit the chain.
        if stored != last.data:
            num_missing = len(last.data) - len(stored)
            found = f"ends {num_missing} bytes before that" if last.data.startswith(stored) else "differs"
            raise LogForked(
                f"{segment}: the stream holds {last}, and the file {found}. The log lost what it had (a power cut with "
                "durability 'os' does that), or was written anew. The stream keeps what it has; begin a new log"
            )

    def read(self, max_records: int, max_bytes: int) -> list[Record]:
        """Return the next whole records, as many as fit the bounds but at least one if there is one."""
        records: list[Record] = []
        for record in self._records():
            self.last = record
            records.append(record)
            max_bytes -= len(record.data)
            if len(records) == max_records or max_bytes <= 0:
                break
        return records

    def trouble(self) -> Damage | None:
        """Return what keeps the log from being read further, None if this is simply its end (or it went on by now).

        A ``torn_tail`` may be a frame that is being written: if the file does not change, it is torn. This reads the
        whole last segment, unless the log plainly ends there.

        Raises:
            LogForked: the file no longer holds what was read.
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
            # The oldest are gone: `read` goes on behind the gap, and has it in `lost`.
            is_retired = damage.kind == "missing_segment" and segments and damage.segment == segments[0].name
            if not is_before and not is_retired:
                return damage
        return None

    def _records(self) -> Iterator[Record]:
        """What follows `last`, which is to be set to each before the next one is asked for."""
        while True:
            # Looked up first: a segment that has a successor is no longer written to.
            successor = self._successor()
            if self.last is not None and not (yield from self._frames(self.last)):
                return
            header = None if successor is None else self._header(successor)
            if header is None:
                return
            yield header

    def _frames(self, last: Record) -> Generator[Record, None, bool]:
        """The frames behind `last` in its segment; return whether that is all there is in it."""
        try:
            data = SegmentBytes(self.directory / last.segment)
        except FileNotFoundError:
            return True
        with data:
            end = last.end
            for offset, frame in data.frames(end, last.next_sequence, last.chain_hash):
                end = offset + frame_bytes(frame)
                yield record_of_frame(last.segment, offset, data.read(offset, frame_bytes(frame)), frame)
            return end >= data.num_bytes  # Otherwise there is something that is no frame, or none yet.

    def _successor(self) -> Path | None:
        """The segment to go on in. Usually one look: in a whole log its name is known."""
        if self.last is not None:
            expected = self.directory / segment_name(self.last.next_sequence)
            if expected.name != self.last.segment and os.path.lexists(expected):
                return expected
            if os.path.lexists(self.directory / self.last.segment):
                return None  # Segments are missing further on, if there are any: for `trouble` to say.
        segments = _segments(self.directory)
        if not segments or (self.last is not None and segments[0].name <= self.last.segment):
            return None
        return segments[0]

    def _header(self, segment: Path) -> Record | None:
        """The header block of the segment, if it can be what follows."""
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
        # The segments before it are gone from the front.
        self.lost[expected] = first - 1
        retired = _retirement(self.directory, self.log_id, expected, first)
        return Record(segment.name, 0, block, first, first, header.chain_hash, retired)


def _retirement(directory: Path, log_id: str, first_sequence: int, end_sequence: int) -> str:
    """One retirement for the sequences, as JSON, made of those that are recorded; "" where these leave a hole."""
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
    """Return how many bytes the log's segments hold behind `last` (None: in all)."""
    total = 0
    for segment in _segments(directory):
        if last is None or segment.name >= last.segment:
            total += _size(segment) - (0 if last is None or segment.name > last.segment else last.end)
    return max(0, total)


def _log_id(directory: Path) -> str:
    reason = "it holds no log segment (*.kvlog)"
    for segment in _segments(directory):
        try:
            log_id = read_header(segment).log_id
            if not _LOG_ID.fullmatch(log_id):
                raise LogError(f"{segment}: {log_id!r} is no log id: 32 hex digits")
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
