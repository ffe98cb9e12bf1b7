"""Writes the index of a log, or continues an earlier index with the events that were appended to the log since.

An earlier index is continued only if no event is missing, and if the chain hash of the next frame follows from the
chain hash in the index. Otherwise the whole log is read. This module must not answer questions about a log.
"""

from __future__ import annotations

import contextlib
import operator
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvledger.adapters.tools.logs.index_file import (
    INDEX_FORMAT,
    SCHEMA,
    Contents,
    IndexMemory,
    SegmentStart,
    extent_of,
    folded_by,
    index_path,
    log_id_of,
    packed,
    unpacked,
)
from kvledger.adapters.tools.logs.log import Batch, StoredLog
from kvledger.adapters.tools.logs.reading import begin_accounts, begin_model, begin_totals, take_batch
from kvledger.adapters.tools.logs.requests import Requests, RequestSummary
from kvledger.adapters.tools.logs.totals import LogTotals
from kvledger.adapters.tools.reasons import Accounts, RequestHistory
from kvledger.lifecycle.reader import Model, Reader
from kvledger.lifecycle.untrusted import from_msgpack
from kvledger.storage.events.files import PRIVATE_DIRECTORY, make_directory, open_for_reading

BATCHES_PER_PLACE = 64
"""Number of frames between two places at which reading can begin."""


def write_index(log: StoredLog) -> None:
    """Write the index of the log as it is now, in place of an older one.

    Raises:
        OSError: the index cannot be written.
    """
    path = index_path(log)
    make_directory(path.parent, durable=False, mode=PRIVATE_DIRECTORY)
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".unfinished")
    os.close(descriptor)
    try:
        earlier = earlier_contents(log)
        if earlier is None or not _continue(log, earlier, path, unfinished):
            Path(unfinished).write_bytes(b"")
            with _opened(unfinished) as connection:
                connection.executescript(SCHEMA)
                connection.execute("BEGIN")
                _Builder(log, connection).build()
        Path(unfinished).replace(path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise


def earlier_contents(log: StoredLog) -> Contents | None:
    """Return the contents of an earlier index of the log; None if no index can be continued."""
    try:
        os.close(open_for_reading(index_path(log)))
        with _opened(f"{index_path(log).absolute().as_uri()}?mode=ro") as connection:
            ((stored,),) = connection.execute("SELECT contents FROM log")
            contents: Contents = from_msgpack(stored, Contents)
        is_foldable = contents.trusted_sequence == contents.last_sequence
        may_go_on = is_foldable and contents.is_whole and contents.describes_beginning(log)
        return contents if may_go_on else None
    except (OSError, sqlite3.Error, ValueError):
        return None


def _continue(log: StoredLog, contents: Contents, earlier: Path, unfinished: str) -> bool:
    """Copy the earlier index, and continue the copy up to the log's present end. Return whether this worked."""
    try:
        with os.fdopen(open_for_reading(earlier), "rb") as source, Path(unfinished).open("wb") as target:
            shutil.copyfileobj(source, target)
        with _opened(unfinished) as connection:
            ((stored,),) = connection.execute("SELECT stored FROM memory")
            connection.execute("BEGIN")
            return _Builder(log, connection, contents, unpacked(stored, IndexMemory)).go_on()
    except Exception:  # noqa: BLE001 -- whatever is wrong with the index, a new one is built
        return False


@contextlib.contextmanager
def _opened(path: str) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, uri=True)) as connection:
        connection.execute("PRAGMA journal_mode=OFF")
        connection.execute("PRAGMA synchronous=OFF")
        yield connection
        if connection.in_transaction:
            connection.execute("COMMIT")


class _Builder:
    """Reads a log and writes its index. Only requests that are not released are kept in memory."""

    def __init__(
        self,
        log: StoredLog,
        connection: sqlite3.Connection,
        earlier: Contents | None = None,
        memory: IndexMemory | None = None,
    ) -> None:
        self._log = log
        self._connection = connection
        self._earlier = earlier
        self._memory = IndexMemory() if memory is None else memory
        if earlier is None:
            self._model = begin_model(log)
            self._totals = begin_totals(log, self._model)
            self._accounts = begin_accounts(log, self._model, on_end=self._write_story)
        else:  # the memory of the index has the state of these three
            self._model = Model(log.core.tables, log.configuration)
            self._totals = LogTotals(self._model, is_complete=earlier.figures is not None)
            self._accounts = Accounts(self._model, on_end=self._write_story, keeps_histories=True)
        self._segments = list(() if earlier is None else earlier.segments_left(log))
        self._counts = (0, 0, 0) if earlier is None else (earlier.num_bytes, earlier.num_frames, earlier.num_events)
        """Bytes, frames and events before the current batch."""
        visitors = Requests(self._model, self._write), self._totals, self._accounts
        self._reader = Reader(self._model, visitors)
        if memory is not None:
            self._reader.resume(memory.reader, log.core.fingerprint())

    def build(self) -> None:
        """Read the whole log."""
        extent = extent_of(self._log)
        self._read(self._log.batches())
        self._finish(extent)

    def go_on(self) -> bool:
        """Read the events that the earlier index does not cover. Return False if the whole log must be read instead."""
        earlier, log = self._earlier, self._log
        if earlier is None:
            return False
        extent = extent_of(log)
        self._connection.execute("DELETE FROM log")
        self._connection.execute("DELETE FROM memory")
        self._connection.execute("DELETE FROM stories WHERE NOT is_over")
        first_sequence = self._segments[0].first_sequence if self._segments else 1
        self._connection.execute("DELETE FROM places WHERE first_sequence < ?", (first_sequence,))
        self._connection.execute("DELETE FROM lives WHERE has_ended AND last_sequence < ?", (first_sequence,))
        self._connection.execute("DELETE FROM stories WHERE last_sequence < ?", (first_sequence,))
        if log.on_bytes is not None:
            log.on_bytes(earlier.num_bytes)
        self._read(log.batches_behind(earlier.last_sequence, earlier.head_hash))
        if any(damage.kind != "torn_tail" for damage in log.damage):
            return False
        self._finish(extent)
        return True

    def _read(self, batches: Iterator[Batch]) -> None:
        memory, log = self._memory, self._log
        earlier_counts = self._counts
        for batch in batches:
            begins_segment = not self._segments or batch.segment != self._segments[-1].name
            if begins_segment:
                self._segments.append(SegmentStart(batch.segment, batch.first_sequence, *self._counts))
            if begins_segment or memory.num_batches % BATCHES_PER_PLACE == 0:
                memory.time_ns = max(memory.time_ns, self._model.moment.time_ns)
                row = (batch.first_sequence, memory.time_ns, batch.segment, batch.offset)
                self._connection.execute("INSERT INTO places VALUES (?, ?, ?, ?)", row)
            memory.num_batches += 1
            counts = log.num_bytes, log.num_frames, log.num_events
            self._counts = tuple(map(operator.add, earlier_counts, counts))
            take_batch(self._reader, log, batch)

    def _finish(self, extent: tuple[str, int]) -> None:
        self._remember()
        self._reader.finish()
        for story in self._accounts.histories:
            self._write_story(story, is_over=False)
        self._connection.execute("INSERT INTO log VALUES (?)", (msgspec.msgpack.encode(self._contents(extent)),))

    def _remember(self) -> None:
        """Store the reader's state. Call this before the reader's `finish`, which treats open requests as over."""
        self._memory.reader = self._reader.capture(self._log.core.fingerprint())
        self._connection.execute("INSERT INTO memory VALUES (?)", (packed(self._memory),))

    def _contents(self, extent: tuple[str, int]) -> Contents:
        log, earlier = self._log, self._earlier
        num_bytes, num_frames, num_events = log.num_bytes, log.num_frames, log.num_events
        first_sequence, last_sequence = log.first_sequence, log.last_sequence
        if earlier is not None:
            num_bytes, num_frames = num_bytes + earlier.num_bytes, num_frames + earlier.num_frames
            num_events += earlier.num_events
            first_sequence, last_sequence = earlier.first_sequence, max(last_sequence, earlier.last_sequence)
        return Contents(
            INDEX_FORMAT,
            folded_by(self._log),
            log_id_of(log),
            extent,
            tuple(self._segments),
            log.head_hash,
            num_bytes,
            num_frames,
            num_events,
            first_sequence,
            last_sequence,
            log.trusted_sequence,
            self._model.moment.time_ns,
            self._totals.complete_figures,
            tuple(log.damage),
        )

    def _write_story(self, story: RequestHistory, *, is_over: bool = True) -> None:
        row = (story.request_id, self._model.moment.sequence, packed(story), is_over)
        self._connection.execute("INSERT INTO stories VALUES (?, ?, ?, ?)", row)

    def _write(self, summary: RequestSummary) -> None:
        row = (
            summary.ordinal,
            summary.request_id,
            summary.first_sequence,
            summary.last_sequence,
            summary.finished_ns is not None,
            msgspec.msgpack.encode(summary),
        )
        self._connection.execute("INSERT OR REPLACE INTO lives VALUES (?, ?, ?, ?, ?, ?)", row)
