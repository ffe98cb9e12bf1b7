"""An index of one log: where each request is in the log, and what became of the request.

The log is read once to build its index. The index is continued when the log has grown or its oldest segments were
retired. It is a file in the user's cache folder. If the file is missing or has another format, it is built again. The
index lacks requests that began before the log's first segment. This module must not judge a log.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import attrs

from kvledger.adapters.tools.exit_codes import CommandFailed, ExitCode
from kvledger.adapters.tools.logs.index_builder import BATCHES_PER_PLACE, earlier_contents, write_index
from kvledger.adapters.tools.logs.index_file import Contents, SegmentStart, index_path, unpacked
from kvledger.adapters.tools.logs.log import Batch, StoredLog
from kvledger.adapters.tools.logs.progress import Progress
from kvledger.adapters.tools.logs.requests import RequestSummary
from kvledger.adapters.tools.reasons import RequestHistory
from kvledger.lifecycle import events as e
from kvledger.lifecycle.untrusted import Undecodable, from_msgpack, msgpack_decoder
from kvledger.storage.events.files import open_for_reading

_Cell = TypeVar("_Cell")
INDEX_FROM_BYTES = 32 << 20
"""Size from which a log gets an index. A smaller log is read in about a second."""


@attrs.frozen
class Span:
    """The first and the last sequence number that an event of one life can have.

    If the request has not finished, the last number is that of the log's last event in the index, because most steps do
    not name the requests that they run.
    """

    ordinal: int
    first_sequence: int
    last_sequence: int


class LogIndex:
    """Answers questions about a log without reading it, or by reading little of it."""

    def __init__(self, path: Path, log: StoredLog) -> None:
        """Open the index at `path`.

        Raises:
            sqlite3.Error: the file is not an index.
            Undecodable: the contents of the index cannot be decoded.
            OSError: the file cannot be read, or is not a regular file.
        """
        os.close(open_for_reading(path))  # SQLite would follow a link and wait for a pipe
        self._connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        self._log, self._path = log, path
        try:
            ((contents,),) = self._connection.execute("SELECT contents FROM log")
            self.contents: Contents = from_msgpack(contents, Contents)
            left: tuple[SegmentStart, ...] = self.contents.segments_left(log)
        except BaseException:
            self._connection.close()
            raise

        self._first_sequence = left[0].first_sequence if left else self.contents.first_sequence
        """Sequence number of the first event that the log still has."""

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def has_ended(self, part: str) -> bool:
        """Whether some lives' request ids contain this text, and all of them had finished when the index was built."""
        ((num_lives, num_ended),) = self._rows(
            "SELECT count(*), sum(has_ended) FROM lives WHERE instr(request_id, ?)", part
        )
        return bool(num_lives) and bool(num_lives == num_ended)

    def lacks_beginning(self, part: str) -> bool:
        """Whether a request whose id contains this text still has events in the log, but its arrival was retired."""
        ((is_any,),) = self._rows(
            "SELECT EXISTS (SELECT 1 FROM lives WHERE instr(request_id, ?) AND first_sequence < ? AND "
            "(last_sequence >= ? OR NOT has_ended))",
            part,
            self._first_sequence,
            self._first_sequence,
        )
        return bool(is_any)

    def request_ids(self, part: str) -> list[str]:
        """Return the request ids that contain this text, in the order of their first arrival."""
        rows = self._rows(
            "SELECT request_id FROM lives WHERE instr(request_id, ?) AND (last_sequence >= ? OR NOT has_ended) "
            "GROUP BY request_id ORDER BY min(ordinal)",
            part,
            self._first_sequence,
        )
        return [self._typed(request_id, str) for (request_id,) in rows]

    def summaries(self, since_sequence: int = 1, request_id: str | None = None) -> Iterator[RequestSummary]:
        """Yield summaries of the lives that began in the log and had not ended before `since_sequence`.

        They are in the order of arrival. `request_id`: yield only the lives of this id; None: of all ids.
        """
        rows = self._rows(
            "SELECT summary FROM lives WHERE first_sequence >= ? AND last_sequence >= ? "
            "AND (? IS NULL OR request_id = ?) ORDER BY first_sequence",
            self._first_sequence,
            since_sequence,
            request_id,
            request_id,
        )
        decode = msgpack_decoder(RequestSummary)
        try:
            for (summary,) in rows:
                yield decode(summary)
        except Undecodable as error:
            raise self._damaged(error) from error

    def spans(self, request_id: str) -> list[Span]:
        """Return the places of a request id's lives in the log, in order."""
        rows = self._rows(
            "SELECT ordinal, first_sequence, last_sequence, has_ended FROM lives WHERE request_id = ? "
            "AND first_sequence >= ? ORDER BY first_sequence",
            request_id,
            self._first_sequence,
        )
        found = [[self._typed(each, int) for each in row] for row in rows]
        spans = [Span(*numbers) for *numbers, _ in found]
        if found and not found[-1][-1]:
            spans[-1] = attrs.evolve(spans[-1], last_sequence=self.contents.last_sequence)
        return spans

    def request_of(self, ordinal: int) -> str:
        """Return the request id of the life with this ordinal; empty if unknown."""
        row = next(self._rows("SELECT request_id FROM lives WHERE ordinal = ?", ordinal), None)
        return "" if row is None else str(row[0])

    def histories(self, request_id: str) -> list[RequestHistory]:
        """Return the histories of a request id's lives, in the order in which the lives ended."""
        rows = self._rows(
            "SELECT story FROM stories WHERE request_id = ? AND last_sequence >= ? ORDER BY rowid",
            request_id,
            self._first_sequence,
        )
        try:
            return [unpacked(story, RequestHistory) for (story,) in rows]
        except (zlib.error, TypeError, Undecodable) as error:
            raise self._damaged(error) from error

    def events_between(self, first_sequence: int, last_sequence: int) -> Iterator[tuple[int, e.Event]]:
        """Yield the events from `first_sequence` to `last_sequence`. Reading begins near `first_sequence`."""
        for batch in self._batches_from("first_sequence", first_sequence):
            for sequence, event in batch.numbered():
                if sequence > last_sequence:
                    return
                if sequence >= first_sequence:
                    yield sequence, event

    def named(self, sequences: Iterable[int]) -> Iterator[tuple[int, e.Event, int]]:
        """Yield (sequence number, event, time) for the events with these numbers, in order. Reads few other events."""
        wanted = sorted(sequences, reverse=True)
        while wanted:
            num_read, first = 0, wanted[-1]
            for batch in self._batches_from("first_sequence", first):
                num_read += 1
                for sequence, event, time_ns in batch.timed():
                    while wanted and wanted[-1] <= sequence:
                        if wanted.pop() == sequence:
                            num_read = 0
                            yield sequence, event, time_ns
                if not wanted or num_read > BATCHES_PER_PLACE:
                    break
            if wanted and wanted[-1] == first:
                wanted.pop()  # this event is not in the log

    def events_around(self, time_ns: int) -> Iterator[tuple[int, e.Event]]:
        """Yield the events of the log, beginning shortly before the first event at `time_ns` or later.

        `time_ns` is the time since the log was opened.
        """
        for batch in self._batches_from("time_ns", time_ns - 1):
            yield from batch.numbered()

    def _batches_from(self, column: str, at_most: int) -> Iterator[Batch]:
        places = "SELECT segment, offset FROM places WHERE first_sequence >= ?"
        query = f"{places} AND {column} <= ? ORDER BY first_sequence DESC LIMIT 1"
        row = next(self._rows(query, self._first_sequence, at_most), None)
        row = row or next(self._rows(f"{places} ORDER BY first_sequence", self._first_sequence), None)
        if row is None:
            return iter(())
        segment, offset = self._typed(row[0], str), self._typed(row[1], int)
        if offset < 0 or segment not in {file.name for file in self._log.files()}:
            raise self._damaged(f"it names byte {offset} of {segment}")
        return self._log.batches_from(segment, offset)

    def _rows(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query.

        Raises:
            CommandFailed: the index is damaged.
        """
        try:
            for row in self._connection.execute(query, values):  # noqa: UP028 -- `yield from` closes too late
                yield row
        except (sqlite3.Error, OverflowError) as error:
            raise self._damaged(error) from error

    def _typed(self, value: object, kind: type[_Cell]) -> _Cell:
        if not isinstance(value, kind):
            raise self._damaged(f"it has {value!r} where {kind.__name__} is expected")
        return value

    def _damaged(self, reason: object) -> CommandFailed:
        text = f"{self._path}: this index is damaged ({reason}); remove it and run the command again"
        return CommandFailed(text, ExitCode.DAMAGED)


def index_for(log: StoredLog, output: Progress, request: str | None = None) -> LogIndex | None:
    """Return the index of a log, and build it if necessary. Return None if the caller must read the log instead.

    None means that the log is small or has no usable index. While a log is being written, its index is always older
    than the log. For a question about one `request` (an id or a part of an id), an older index is enough if
    every request whose id contains this text had finished when the index was built.
    """
    if log.is_smaller_than(INDEX_FROM_BYTES) or not log.header:
        return None
    index = open_index(log, request)
    if index is None:
        index = _built(log, output)
    if index is not None and request is not None and index.lacks_beginning(request):
        index.close()
        return None
    return index


def _built(log: StoredLog, output: Progress) -> LogIndex | None:
    """Build the index of the log as it is now. If the index cannot be written, print a remark and return None."""
    try:
        what = "bringing the index up to date" if earlier_contents(log) is not None else "building an index, once"
        with output.progress(log, what):
            return build_index(log)
    except (OSError, sqlite3.Error, OverflowError) as error:
        output.remark(f"no index can be kept at {index_path(log)} ({error}); the whole log is read each time")
        return None


def open_index(log: StoredLog, request: str | None = None) -> LogIndex | None:
    """Return the existing index if it is up to date, or sufficient for `request` (see `index_for`); else None."""
    try:
        index = LogIndex(index_path(log), log)
    except (sqlite3.Error, ValueError, OSError):
        return None
    with contextlib.suppress(CommandFailed, OSError):
        if index.contents.describes(log):
            return index
        if request is not None and index.contents.describes_beginning(log) and index.has_ended(request):
            return index
    index.close()
    return None


def build_index(log: StoredLog) -> LogIndex:
    """Build the index of the log as it is now, continuing an earlier one if possible.

    Raises:
        OSError: the index cannot be written.
    """
    write_index(log)
    return LogIndex(index_path(log), log)
