"""Where the index of a log is kept, and what it says about the log as a whole. It must not know requests or events."""

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
"""Grows with every change of what is in an index; another one is built anew."""

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
    """A value for the index; what it looks like may change with every version."""
    return zlib.compress(msgspec.msgpack.encode(value), 1)


def unpacked(stored: bytes, value_type: type[_Value]) -> _Value:
    """The other way round.

    Raises:
        zlib.error: it is something else.
        Undecodable: likewise.
    """
    return from_msgpack(zlib.decompress(stored), value_type, as_counter)


@attrs.frozen
class SegmentStart:
    """A segment that was read, its first event, and what an index had counted before it."""

    name: str
    first_sequence: int
    num_bytes: int
    num_frames: int
    num_events: int


@attrs.frozen
class Contents:
    """What an index says about the log as a whole, as it was when the index was built."""

    index_format: int
    folded_by: str
    """Which code has made it, see `folded_by`."""
    log_id: str
    extent: tuple[str, int]
    """The last segment, and its size in bytes, as it was written."""
    segments: tuple[SegmentStart, ...]
    """Those that were read, but for some that were retired since."""
    head_hash: str
    num_bytes: int
    num_frames: int
    num_events: int
    first_sequence: int
    last_sequence: int
    trusted_sequence: int
    last_time_ns: int
    figures: Figures | None
    """None: the snapshot from which folding begins has no totals."""
    damage: tuple[Damage, ...]

    def is_of(self, log: StoredLog) -> bool:
        """Whether it is of this log, and made by this code."""
        return (self.index_format, self.folded_by, self.log_id) == (INDEX_FORMAT, folded_by(log), log_id_of(log))

    def describes(self, log: StoredLog) -> bool:
        """Whether it is of this log as it is now."""
        return self.is_of(log) and self.extent == extent_of(log) and self._has_segments_of(log)

    def describes_beginning(self, log: StoredLog) -> bool:
        """Whether it is of this log as it was earlier: appended to since, and perhaps its oldest segments retired."""
        last, num_bytes = self.extent
        files = {file.name: file for file in log.files()}
        if not self.is_of(log) or last not in files or not self._has_segments_of(log):
            return False
        return num_written_bytes(files[last]) >= num_bytes

    def _has_segments_of(self, log: StoredLog) -> bool:
        """Whether what was read is still there, or is recorded as retired."""
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
        """Those that were read, from the log's first segment on."""
        first = log.files()[0].name
        return tuple(itertools.dropwhile(lambda segment: segment.name != first, self.segments))

    def copy_counts(self, log: StoredLog) -> None:
        """Give the opened log the counts and the damage that a reading of it would have."""
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
        """Whether no event is missing between the first and the last."""
        return all(damage.kind == "torn_tail" for damage in self.damage)


class IndexMemory(msgspec.Struct, forbid_unknown_fields=True):
    """What whoever built an index knew at its end, so that it is continued where the log has grown, not built anew.

    Plain values, of which nothing is checked but their types: an index may be false, it can make nothing else happen.
    """

    reader: bytes = b""
    """What the reader knows, the requests that are not over, the totals and the reasons: see `Reader.capture`."""
    num_batches: int = 0
    time_ns: int = 0
    """The latest time before the last place at which reading can begin."""


def folded_by(log: StoredLog) -> str:
    """The code that reads the log, and what it finds in it; and whether it begins with what other code has folded."""
    code = [hash_of_reader(), *map(hash_of_package, (__name__, reasons.__name__)), hash_of_module(figures.__name__)]
    return f"{dict(log.core.code)} {' '.join(code)}{' and others' * log.trusts_snapshots}"


def index_path(log: StoredLog) -> Path:
    """Where the log's index is kept: below `XDG_CACHE_HOME`, or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    # Two copies of a log have one id, and may end at different places.
    place = hashlib.blake2b(os.fsencode(log.path.absolute()), digest_size=4).hexdigest()
    return Path(cache) / "kvledger" / "indexes" / f"{log_id_of(log)}-{place}.sqlite"


def extent_of(log: StoredLog) -> tuple[str, int]:
    """The last segment and its size: what changes when a log is appended to."""
    last = log.files()[-1]
    return last.name, num_written_bytes(last)


def log_id_of(log: StoredLog) -> str:
    """The log's identity, as far as it may stand in a file name."""
    log_id = log.header.get("log_id")
    return log_id if isinstance(log_id, str) and log_id.isalnum() else "unknown"
