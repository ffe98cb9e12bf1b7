"""The file of a log's index: where it is kept, and what it contains about the whole log.

This module must not depend on requests or events.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import zlib
from pathlib import Path
from typing import TypeVar

import attrs
import msgspec

from kvledger.adapters import figures
from kvledger.adapters.figures import Figures
from kvledger.adapters.tools import reasons
from kvledger.adapters.tools.logs.log import StoredLog
from kvledger.lifecycle.code import hash_of_module, hash_of_package, hash_of_reader
from kvledger.lifecycle.untrusted import as_counter, from_msgpack
from kvledger.storage.events import Damage
from kvledger.storage.events.retirements import read_retirements, retired_between
from kvledger.storage.events.segment_bytes import num_written_bytes

INDEX_FORMAT = 21
"""Version of the format. Increase it at every change of an index's contents. Indexes of other versions are not used."""

SCHEMA = """
CREATE TABLE log (contents BLOB NOT NULL);
CREATE TABLE memory (stored BLOB NOT NULL);
CREATE TABLE places (first_sequence INTEGER PRIMARY KEY, time_ns INTEGER NOT NULL, segment TEXT NOT NULL,
                     offset INTEGER NOT NULL);
CREATE TABLE lives (ordinal INTEGER PRIMARY KEY, request_id TEXT NOT NULL, first_sequence INTEGER NOT NULL,
                    last_sequence INTEGER NOT NULL, has_ended INTEGER NOT NULL, summary BLOB NOT NULL);
CREATE INDEX lives_by_id ON lives (request_id);
CREATE TABLE stories (request_id TEXT NOT NULL, last_sequence INTEGER NOT NULL, story BLOB NOT NULL,
                      is_over INTEGER NOT NULL);
CREATE INDEX stories_by_id ON stories (request_id);
"""


_Value = TypeVar("_Value")


def packed(value: object) -> bytes:
    """Encode a value for the index. The format may change with every version."""
    return zlib.compress(msgspec.msgpack.encode(value), 1)


def unpacked(stored: bytes, value_type: type[_Value]) -> _Value:
    """Decode a value that `packed` returned.

    Raises:
        zlib.error: the stored bytes are not compressed data.
        Undecodable: the data is not a value of this type.
    """
    return from_msgpack(zlib.decompress(stored), value_type, as_counter)


@attrs.frozen
class SegmentStart:
    """A segment that was read, its first event, and how much of the log had been read before this segment."""

    name: str
    first_sequence: int
    num_bytes: int
    num_frames: int
    num_events: int


@attrs.frozen
class Contents:
    """What an index contains about the whole log, as the log was when the index was built."""

    index_format: int
    folded_by: str
    """Hashes of the code that made the index; see the function `folded_by`."""
    log_id: str
    extent: tuple[str, int]
    """Name of the last segment, and the segment's size in bytes before compression."""
    segments: tuple[SegmentStart, ...]
    """Segments that were read. Segments that were retired later may be left out."""
    head_hash: str
    num_bytes: int
    num_frames: int
    num_events: int
    first_sequence: int
    last_sequence: int
    trusted_sequence: int
    last_time_ns: int
    figures: Figures | None
    """Totals of the log; None: unknown, because folding begins at a snapshot without totals."""
    damage: tuple[Damage, ...]

    def is_of(self, log: StoredLog) -> bool:
        """Whether the index belongs to this log and was made by this code."""
        return (self.index_format, self.folded_by, self.log_id) == (INDEX_FORMAT, folded_by(log), log_id_of(log))

    def describes(self, log: StoredLog) -> bool:
        """Whether the index belongs to this log and is up to date."""
        return self.is_of(log) and self.extent == extent_of(log) and self._has_segments_of(log)

    def describes_beginning(self, log: StoredLog) -> bool:
        """Whether the index describes this log as it is, or as it was before events were appended or retired."""
        last, num_bytes = self.extent
        files = {file.name: file for file in log.files()}
        if not self.is_of(log) or last not in files or not self._has_segments_of(log):
            return False
        return num_written_bytes(files[last]) >= num_bytes

    def _has_segments_of(self, log: StoredLog) -> bool:
        """Whether each segment that was read exists in the log or is recorded as retired."""
        names = [file.name for file in log.files()]
        left = self.segments_left(log)
        if not left:
            return not self.segments
        if names[: len(left)] != [segment.name for segment in left]:
            return False
        first, first_left = self.segments[0].first_sequence, left[0].first_sequence
        if first == first_left:
            return True
        retirements = read_retirements(log.path)
        return self.is_whole and retired_between(retirements, log.header.get("log_id"), first, first_left) is not None

    def segments_left(self, log: StoredLog) -> tuple[SegmentStart, ...]:
        """Return the segments that were read and that the log still has."""
        first = log.files()[0].name
        return tuple(itertools.dropwhile(lambda segment: segment.name != first, self.segments))

    def copy_counts(self, log: StoredLog) -> None:
        """Set the counters and the damage of an opened log to the values that reading the log would give."""
        left = self.segments_left(log)
        first = left[0] if left else SegmentStart("", self.first_sequence, 0, 0, 0)
        log.num_events = self.num_events - first.num_events
        log.num_frames = self.num_frames - first.num_frames
        log.num_bytes = self.num_bytes - first.num_bytes
        log.first_sequence, log.last_sequence = first.first_sequence, self.last_sequence
        log.trusted_sequence = self.trusted_sequence
        log.damage[:] = self.damage

    @property
    def is_whole(self) -> bool:
        """Whether no event is missing between the first and the last event of the index."""
        return all(damage.kind == "torn_tail" for damage in self.damage)


class IndexMemory(msgspec.Struct, forbid_unknown_fields=True):
    """State from which an index is continued when the log has grown.

    All values are plain data, and kvledger checks only their types. A forged index can cause wrong results, but no
    other harm.
    """

    reader: bytes = b""
    """State of the reader, with its open requests, totals and reasons; see `Reader.capture`."""
    num_batches: int = 0
    time_ns: int = 0
    """Latest time of an event before the last of the places at which reading can begin."""


def folded_by(log: StoredLog) -> str:
    """Return what an index depends on: hashes of the code that reads and indexes the log, and `trusts_snapshots`."""
    code = [hash_of_reader(), *map(hash_of_package, (__name__, reasons.__name__)), hash_of_module(figures.__name__)]
    return f"{dict(log.core.code)} {' '.join(code)}{' and others' * log.trusts_snapshots}"


def index_path(log: StoredLog) -> Path:
    """Return the path of the log's index, below `$XDG_CACHE_HOME` or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    # Two copies of a log have the same id, and may end at different places.
    place = hashlib.blake2b(os.fsencode(log.path.absolute()), digest_size=4).hexdigest()
    return Path(cache) / "kvledger" / "indexes" / f"{log_id_of(log)}-{place}.sqlite"


def extent_of(log: StoredLog) -> tuple[str, int]:
    """Return the name and the size of the log's last segment. They change when events are appended."""
    last = log.files()[-1]
    return last.name, num_written_bytes(last)


def log_id_of(log: StoredLog) -> str:
    """Return the log's id, or "unknown" if the id cannot be part of a file name."""
    log_id = log.header.get("log_id")
    return log_id if isinstance(log_id, str) and log_id.isalnum() else "unknown"
