"""An index over one log: where each request lives in it, and what became of it.

Built by one pass, kept outside of the log in the user's cache folder, and worth nothing by itself: whoever deletes it,
or has one of an older log or version, pays another pass. It must not judge a log, and nothing is ever only in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import attrs
import msgspec

from kvledger.adapters.reading.listener import Listener
from kvledger.adapters.reading.logs import Batch, LogDamage, StoredLog
from kvledger.adapters.reading.requests import Requests, RequestSummary
from kvledger.adapters.reading.story_codec import decode_story, encode_story
from kvledger.lifecycle import HandlerRegistry
from kvledger.lifecycle import events as e
from kvledger.lifecycle.belief import Projections
from kvledger.lifecycle.projections.totals import Figures
from kvledger.lifecycle.reasons import Accounts, Story

INDEX_FORMAT = 3
"""Grows with every change of what is in an index; another one is built anew."""

INDEX_FROM_BYTES = 32 << 20
"""A smaller log is read in about a second."""
_BATCHES_PER_PLACE = 64
_SCHEMA = """
CREATE TABLE log (contents BLOB NOT NULL);
CREATE TABLE places (first_sequence INTEGER PRIMARY KEY, time_ns INTEGER NOT NULL, segment TEXT NOT NULL,
                     offset INTEGER NOT NULL);
CREATE TABLE lives (ordinal INTEGER PRIMARY KEY, request_id TEXT NOT NULL, first_sequence INTEGER NOT NULL,
                    last_sequence INTEGER NOT NULL, has_ended INTEGER NOT NULL, summary BLOB NOT NULL);
CREATE INDEX lives_by_id ON lives (request_id);
CREATE TABLE stories (request_id TEXT NOT NULL, story BLOB NOT NULL);
CREATE INDEX stories_by_id ON stories (request_id);
"""


@attrs.frozen
class Contents:
    """What an index says about the log as a whole, as it was when the index was built."""

    index_format: int
    log_id: str
    extent: tuple[str, str, int]
    """The first segment, the last one, and the size of that in bytes."""
    head_hash: str
    num_bytes: int
    num_frames: int
    num_events: int
    first_sequence: int
    last_sequence: int
    trusted_sequence: int
    last_time_ns: int
    figures: Figures
    damage: tuple[LogDamage, ...]


@attrs.frozen
class Span:
    """The events of one life of a request: its own lie between these two, both included."""

    ordinal: int
    first_sequence: int
    last_sequence: int


class LogIndex:
    """Answers without reading the log, or by reading little of it."""

    def __init__(self, path: Path, log: StoredLog) -> None:
        """Open the index at `path`. Raises `sqlite3.Error` and `msgspec.MsgspecError` for what is no index."""
        self._connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        self._log = log
        ((contents,),) = self._connection.execute("SELECT contents FROM log")
        self.contents = msgspec.msgpack.decode(contents, type=Contents)

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def describes(self, log: StoredLog) -> bool:
        """Whether the index is of this log as it is now, and of this version."""
        return self._is_of(log) and self.contents.extent == extent_of(log)

    def describes_beginning(self, log: StoredLog) -> bool:
        """Whether the index is of this log as it was earlier: appended to since, and nothing retired."""
        first, last, num_bytes = self.contents.extent
        files = {file.name: file for file in log.files()}
        if not self._is_of(log) or extent_of(log)[0] != first or last not in files:
            return False
        return files[last].stat().st_size >= num_bytes

    def has_ended(self, beginning: str) -> bool:
        """Whether there are requests that begin so, and the end of each is in the index."""
        ((num_lives, num_ended),) = self._connection.execute(
            "SELECT count(*), sum(has_ended) FROM lives WHERE substr(request_id, 1, ?) = ?", (len(beginning), beginning)
        )
        return bool(num_lives) and bool(num_lives == num_ended)

    def _is_of(self, log: StoredLog) -> bool:
        return (self.contents.index_format, self.contents.log_id) == (INDEX_FORMAT, _log_id(log))

    @property
    def is_whole(self) -> bool:
        """Whether no event is missing between the first and the last."""
        return all(damage.kind == "torn_tail" for damage in self.contents.damage)

    def request_ids(self, beginning: str) -> list[str]:
        """The ids of requests that begin so, in the order of their first arrival."""
        rows = self._connection.execute(
            "SELECT request_id FROM lives WHERE substr(request_id, 1, ?) = ? GROUP BY request_id ORDER BY min(ordinal)",
            (len(beginning), beginning),
        )
        return [request_id for (request_id,) in rows]

    def summaries(self, since_sequence: int = 1) -> Iterator[RequestSummary]:
        """The lives that had not ended before `since_sequence`, in the order of arrival."""
        rows = self._connection.execute(
            "SELECT summary FROM lives WHERE last_sequence >= ? ORDER BY first_sequence", (since_sequence,)
        )
        decoder = msgspec.msgpack.Decoder(RequestSummary)
        return (decoder.decode(summary) for (summary,) in rows)

    def spans(self, request_id: str) -> list[Span]:
        """The lives of an id, in order."""
        rows = self._connection.execute(
            "SELECT ordinal, first_sequence, last_sequence FROM lives WHERE request_id = ? ORDER BY first_sequence",
            (request_id,),
        )
        return [Span(*row) for row in rows]

    def request_of(self, ordinal: int) -> str:
        """The id of the life with that ordinal, empty where it is not known."""
        row = self._connection.execute("SELECT request_id FROM lives WHERE ordinal = ?", (ordinal,)).fetchone()
        return "" if row is None else str(row[0])

    def stories(self, request_id: str) -> list[Story]:
        """The stories of an id's lives, in the order in which they ended."""
        rows = self._connection.execute("SELECT story FROM stories WHERE request_id = ? ORDER BY rowid", (request_id,))
        return [decode_story(story) for (story,) in rows]

    def events_between(self, first_sequence: int, last_sequence: int) -> Iterator[tuple[int, e.Event]]:
        """Every event from `first_sequence` to `last_sequence`, read from the log at once from there."""
        for batch in self._batches_from("first_sequence", first_sequence):
            for sequence, event in batch.numbered():
                if sequence > last_sequence:
                    return
                if sequence >= first_sequence:
                    yield sequence, event

    def event(self, sequence: int) -> e.Event | None:
        """The event with that number, or None where it is not in the log."""
        return next((event for _, event, _ in self.named([sequence])), None)

    def named(self, sequences: Iterable[int]) -> Iterator[tuple[int, e.Event, int]]:
        """The events with these numbers, in order, each with its time; reads little besides them."""
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
                if not wanted or num_read > _BATCHES_PER_PLACE:
                    break
            if wanted and wanted[-1] == first:
                wanted.pop()  # it is not in the log

    def events_around(self, time_ns: int) -> Iterator[tuple[int, e.Event]]:
        """Every event from a place on that has all of `time_ns` (since the log was opened) and later behind it."""
        for batch in self._batches_from("time_ns", time_ns - 1):
            yield from batch.numbered()

    def _batches_from(self, column: str, at_most: int) -> Iterator[Batch]:
        query = f"SELECT segment, offset FROM places WHERE {column} <= ? ORDER BY first_sequence DESC LIMIT 1"  # noqa: S608 -- the column is ours
        row = self._connection.execute(query, (at_most,)).fetchone()
        row = row or self._connection.execute("SELECT segment, offset FROM places ORDER BY first_sequence").fetchone()
        return iter(()) if row is None else self._log.batches_from(*row)


@attrs.define
class _Life:
    summary: RequestSummary
    first_sequence: int
    last_sequence: int


class _Builder:
    """One pass over a log, writing as it goes; holds only the requests that are not released."""

    def __init__(self, log: StoredLog, connection: sqlite3.Connection) -> None:
        self._log = log
        self._connection = connection
        self._projections = log.start(HandlerRegistry()) or Projections(log.configuration)
        self._requests = Requests()
        self._lives: dict[str, _Life] = {}
        """Those that are not released."""
        self._job_owners: dict[int, str] = {}
        self._num_batches = 0
        self._time_ns = 0
        self._is_foldable = True
        self._accounts = Accounts(log.configuration, on_end=self._write_story, keeps_stories=True)
        self._last_sequence = 0

    def build(self) -> Contents:
        """Read everything."""
        log = self._log
        extent = extent_of(log)
        for batch in log.batches():
            if self._num_batches % _BATCHES_PER_PLACE == 0:
                self._time_ns = max(self._time_ns, self._projections.tracker.time_ns)
                row = (batch.first_sequence, self._time_ns, batch.segment, batch.offset)
                self._connection.execute("INSERT INTO places VALUES (?, ?, ?, ?)", row)
            self._num_batches += 1
            for sequence, event in batch.numbered():
                self._take(sequence, event)
        self._requests.finish(self._projections)
        for life in self._lives.values():
            self._write(life)
        for story in self._accounts.stories:
            self._write_story(story)
        return Contents(
            INDEX_FORMAT,
            _log_id(log),
            extent,
            log.head_hash,
            log.num_bytes,
            log.num_frames,
            log.num_events,
            log.first_sequence,
            log.last_sequence,
            log.trusted_sequence,
            self._projections.tracker.time_ns,
            self._projections.totals.figures,
            tuple(log.damage),
        )

    def _take(self, sequence: int, event: e.Event) -> None:
        self._requests.take(event)
        if isinstance(event, e.RequestArrived):
            earlier = self._lives.pop(event.request_id, None)
            if earlier is not None:
                self._write(earlier)
            self._lives[event.request_id] = _Life(self._requests.summaries.pop(), sequence, sequence)
        else:
            self._note(sequence, event)
        if sequence != self._last_sequence + 1:
            self._accounts.lose()
        self._last_sequence = sequence
        self._accounts.take(sequence, event)
        if self._is_foldable and self._log.start_sequence < sequence <= self._log.trusted_sequence:
            try:
                self._projections.fold(event, sequence)
            except Exception:  # noqa: BLE001 -- a forged log; whoever reads it is told by the reading, not by its index
                self._is_foldable = False

    def _note(self, sequence: int, event: e.Event) -> None:
        if isinstance(event, e.TransferReported):
            life = self._lives.get(self._job_owners.get(event.job_id, ""))
        else:
            life = self._lives.get(getattr(event, "request_id", ""))
        if life is None:
            return
        life.last_sequence = sequence
        if isinstance(event, e.LoadIssued | e.SaveIssued | e.TailSaveIssued):
            self._job_owners[event.job_id] = event.request_id
        elif isinstance(event, e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed):
            self._job_owners.pop(event.job_id, None)
        elif isinstance(event, e.RequestReleased):
            self._write(self._lives.pop(event.request_id))

    def _write_story(self, story: Story) -> None:
        self._connection.execute("INSERT INTO stories VALUES (?, ?)", (story.request_id, encode_story(story)))

    def _write(self, life: _Life) -> None:
        summary = life.summary
        row = (
            summary.ordinal,
            summary.request_id,
            life.first_sequence,
            life.last_sequence,
            summary.finished_ns is not None,
            msgspec.msgpack.encode(summary),
        )
        self._connection.execute("INSERT OR REPLACE INTO lives VALUES (?, ?, ?, ?, ?, ?)", row)


def index_for(log: StoredLog, output: Listener, request: str | None = None) -> LogIndex | None:
    """The index of a log that is large enough to need one, built if need be; None where reading is quick.

    For a question about one `request` (its id or a beginning of it) an index of the log as it was earlier will do, if
    it has the end of each request that begins so: a log that is being written has no index of its own for long.
    An index that cannot be written is no reason to tell nothing: then the log is read.
    """
    if log.total_bytes() < INDEX_FROM_BYTES:
        return None
    index = open_index(log, request)
    if index is not None:
        return index
    try:
        with output.progress(log, "building an index, once"):
            return build_index(log)
    except (OSError, sqlite3.Error) as error:
        output.remark(f"no index can be kept at {index_path(log)} ({error}); the whole log is read each time")
        return None


def open_index(log: StoredLog, request: str | None = None) -> LogIndex | None:
    """The index of the log as it is now, if there is one, or one that knows all of a request; see `index_for`."""
    path = index_path(log)
    try:
        index = LogIndex(path, log)
        if index.describes(log):
            return index
        if request is not None and index.describes_beginning(log) and index.has_ended(request):
            return index
    except (sqlite3.Error, msgspec.MsgspecError, ValueError, OSError):
        return None
    index.close()
    return None


def build_index(log: StoredLog) -> LogIndex:
    """Read the whole log and write its index, in place of an older one.

    Raises:
        OSError: the index cannot be written.
    """
    path = index_path(log)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".unfinished")
    os.close(descriptor)
    try:
        with contextlib.closing(sqlite3.connect(unfinished, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode=OFF")
            connection.execute("PRAGMA synchronous=OFF")
            connection.executescript(_SCHEMA)
            connection.execute("BEGIN")
            contents = _Builder(log, connection).build()
            connection.execute("INSERT INTO log VALUES (?)", (msgspec.msgpack.encode(contents),))
            connection.execute("COMMIT")
        Path(unfinished).replace(path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise
    return LogIndex(path, log)


def index_path(log: StoredLog) -> Path:
    """Where the log's index is kept: below `XDG_CACHE_HOME`, or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    # Two copies of a log have one id, and may end at different places.
    place = hashlib.blake2b(os.fsencode(log.path.absolute()), digest_size=4).hexdigest()
    return Path(cache) / "kvledger" / "indexes" / f"{_log_id(log)}-{place}.sqlite"


def extent_of(log: StoredLog) -> tuple[str, str, int]:
    """The first segment, the last one and its size: what changes when a log is appended to, or loses its oldest."""
    files: Sequence[Path] = log.files()
    return files[0].name, files[-1].name, files[-1].stat().st_size


def _log_id(log: StoredLog) -> str:
    log_id = log.header.get("log_id")
    return log_id if isinstance(log_id, str) and log_id.isalnum() else "unknown"
