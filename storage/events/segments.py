"""The event store on disk: a directory of append-only segment files with one writer.

`append` is the hot path. It makes one `write(2)` per frame in the caller's thread, so a killed process loses no event
that was appended. After a failed write, the file is cut back to its last complete frame. Each engine start begins a new
log, so no frame is ever appended to a log that a crash left incomplete. `segment_file` and `frames` describe the bytes.
`reader` finds damage.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from kvledger.storage.events.end_record import END_RECORD_NAME, EndRecord, RecordedEnd
from kvledger.storage.events.files import make_directory, open_for_writing
from kvledger.storage.events.frames import (
    FRAME_HEADER_BYTES,
    MAX_EVENTS,
    MAX_PAYLOAD_BYTES,
    FrameKind,
    check_append,
    encode_frame,
)
from kvledger.storage.events.group_sync import GroupSync
from kvledger.storage.events.reader import LogReader
from kvledger.storage.events.retirements import RETIREMENTS_NAME, reserve_retirement
from kvledger.storage.events.segment_file import (
    NO_PREVIOUS_HASH,
    decode_header,
    encode_header,
    read_header,
    segment_name,
    segment_paths,
    write_segment,
)
from kvledger.storage.events.store import AppendConflict, Durability, LogClosed, LogDamaged, LogError
from kvledger.storage.events.writer_lock import LOCK_NAME, lock_directory, unlock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvledger.storage.events.frames import Frame
    from kvledger.storage.events.maintenance import Maintenance

__all__ = ["SegmentEventStore"]

_EVENTS: Final = int(FrameKind.EVENTS)
_GAP: Final = int(FrameKind.GAP)


@attrs.frozen
class LogEnd:
    """The end of a log. `offset` is the offset in `segment` after the last frame. Hashes have 16 bytes."""

    segment: Path
    offset: int
    next_sequence: int
    chain_hash: bytes
    """Chain hash that the next frame continues: `head_hash`, or the header's hash if the segment has no frame."""
    head_hash: bytes


class SegmentEventStore:
    """An `EventStore` in a directory. Use `create` to make one.

    `header` is the mapping that was given to `create`, plus `log_id`.
    """

    def __init__(
        self,
        directory: Path,
        lock: int,
        header: Mapping[str, object],
        end: LogEnd,
        durability: Durability,
        segment_bytes: int,
        sync_interval_ms: float,
        maintenance: Maintenance | None,
    ) -> None:
        """Use a locked directory whose log ends at `end`; see `create`."""
        self.directory: Final = directory
        self.header: Final = dict(header)
        self.durability: Final = durability
        self._segment_bytes = segment_bytes
        self._maintenance = maintenance
        self._lock = lock
        self._closed = False
        self._rollback_pending = False
        self._unused_segment: Path | None = None
        in_use = read_header(end.segment)
        recorded = RecordedEnd(in_use.log_id, end.segment.name, end.next_sequence, end.head_hash.hex())
        self._record = EndRecord(directory, recorded, durable=durability is Durability.DISK)
        self._segment = end.segment
        self._first_frame_offset, self._segment_number = in_use.num_bytes, in_use.segment_number
        self._descriptor = open_for_writing(end.segment, os.O_WRONLY | os.O_APPEND)
        # One attribute, so that one assignment commits: offset, next sequence, hash to chain from, head hash.
        self._end = (end.offset, end.next_sequence, end.chain_hash, end.head_hash)
        is_synced = durability is Durability.DISK
        self._sync = GroupSync(self._descriptor, sync_interval_ms) if is_synced else None
        if self._maintenance is not None:
            self._maintenance.start(self._segment, self._segment_bytes)

    @classmethod
    def create(
        cls,
        directory: Path,
        header: Mapping[str, object],
        durability: Durability = Durability.OS,
        segment_bytes: int = 64 << 20,
        sync_interval_ms: float = 50.0,
        maintenance: Maintenance | None = None,
    ) -> SegmentEventStore:
        """Begin a log in `directory`, which is created if missing. `header` has JSON values.

        No segment exceeds `segment_bytes`, unless its only frame is too large. `maintenance` is started when
        the log begins and with each new segment.

        Raises:
            LogError: the directory already has a log, or the header cannot be stored.
            LogLocked: another writer has locked the directory.
            OSError: the directory cannot be written.
        """
        log_id = uuid.uuid4().hex
        block = encode_header(log_id, 1, NO_PREVIOUS_HASH, header, 1)
        directory = Path(directory)
        is_new = not directory.exists()
        make_directory(directory, durable=durability is Durability.DISK)
        lock = lock_directory(directory)
        try:
            _check_empty(directory)
            try:
                segment = write_segment(directory, 1, block, durable=durability is Durability.DISK)
                reserve_retirement(directory, durable=durability is Durability.DISK)
                chain_hash = decode_header(block, segment.name).chain_hash
                end = LogEnd(segment, len(block), 1, chain_hash, chain_hash)
                whole_header = {**header, "log_id": log_id}
                return cls(directory, lock, whole_header, end, durability, segment_bytes, sync_interval_ms, maintenance)
            except BaseException:
                for name in (segment_name(1), END_RECORD_NAME, RETIREMENTS_NAME):
                    with contextlib.suppress(OSError):
                        (directory / name).unlink(missing_ok=True)
                raise
        except BaseException:
            if is_new:
                with contextlib.suppress(OSError):
                    (directory / LOCK_NAME).unlink()
                    directory.rmdir()
            unlock(lock)
            raise

    @property
    def next_sequence(self) -> int:
        """Sequence number of the next appended event."""
        return self._end[1]

    @property
    def segment(self) -> Path:
        """Path of the segment in use. Each access returns the same object until the next segment begins."""
        return self._segment

    @property
    def head_hash(self) -> bytes:
        """Chain hash of the last frame, or of the header while the log is empty."""
        return self._end[3]

    def is_quick(self, num_payload_bytes: int) -> bool:
        """See `EventStore.is_quick`. False if a new segment must begin, or if a failed write must be undone first."""
        offset = self._end[0]
        fits = offset + FRAME_HEADER_BYTES + num_payload_bytes <= self._segment_bytes
        is_right = not (self._rollback_pending or self._unused_segment is not None)
        return is_right and (fits or offset <= self._first_frame_offset)

    def append(self, payload: bytes, num_events: int, *, expected_sequence: int | None = None) -> int:
        """Append one frame; see `EventStore.append`."""
        if expected_sequence is not None and expected_sequence != self._end[1]:
            raise AppendConflict.at(expected_sequence, self._end[1])
        return self._append(_EVENTS, payload, num_events)

    def append_gap(self, num_events: int, reason: str) -> int:
        """Append a GAP frame; see `EventStore.append_gap`."""
        return self._append(_GAP, reason.encode(errors="replace"), num_events)

    def read(self, from_sequence: int = 1) -> Iterator[Frame]:
        """Yield the frames in order; see `EventStore.read`."""
        reader = LogReader(self.directory, from_sequence)
        for frame in reader:
            self._refuse_damage(reader)
            yield frame
        self._refuse_damage(reader)

    def note_unwritten(self, num_events: int, reason: str) -> None:
        """See `EventStore.note_unwritten`. Works on a full disk, because the end record has reserved its space."""
        if not self._closed:
            self._note_end(num_events, reason)

    def flush(self) -> None:
        """See `EventStore.flush`."""
        self._check_open()
        if self._sync is not None:
            self._sync.sync()

    def close(self, expected_sequence: int | None = None) -> None:
        """See `EventStore.close`. The log is closed even if the last sync raises `OSError`."""
        if self._closed:
            return
        self._closed = True
        is_closed = False
        try:
            if self._rollback_pending:
                self._roll_back()
            self._remove_unused_segment()
            if self._sync is not None:
                self._sync.stop()
                self._sync.sync()
            is_closed = True
        finally:
            self._note_end(is_closed=is_closed, expected_sequence=expected_sequence)
            if self._maintenance is not None:
                self._maintenance.stop()
            self._record.close()
            os.close(self._descriptor)
            unlock(self._lock)

    def _append(self, kind: int, payload: bytes, num_events: int) -> int:
        offset, first_sequence, chain_hash, _ = self._end
        if not 0 < num_events <= MAX_EVENTS or len(payload) > MAX_PAYLOAD_BYTES:
            check_append(num_events, len(payload))
        if self._closed or self._rollback_pending or self._sync is not None or self._unused_segment is not None:
            self._prepare()
        frame, frame_hash = encode_frame(kind, first_sequence, num_events, payload, chain_hash)
        if offset + len(frame) > self._segment_bytes and offset > self._first_frame_offset:
            self._start_segment()
            offset, _, chain_hash, _ = self._end
            frame, frame_hash = encode_frame(kind, first_sequence, num_events, payload, chain_hash)
        try:
            num_written = os.write(self._descriptor, frame)
            while num_written < len(frame):
                # The next write completes the frame or fails with the reason.
                num_written += os.write(self._descriptor, frame[num_written:])
            self._end = (offset + num_written, first_sequence + num_events, frame_hash, frame_hash)
        except BaseException:
            # Also after an interrupt before the commit: cut the file back to what is committed.
            self._rollback_pending = True
            self._try_to_roll_back()
            raise
        if self._sync is not None:
            self._sync.note_written()
        return first_sequence

    def _prepare(self) -> None:
        """Check that the log is open and no sync has failed. Undo failed writes.

        Without syncs, most appends do not need this.
        """
        self._check_open()
        if self._rollback_pending:
            self._roll_back()
        self._remove_unused_segment()
        if self._sync is not None:
            self._sync.check()

    def _roll_back(self) -> None:
        os.ftruncate(self._descriptor, self._end[0])
        self._rollback_pending = False

    def _try_to_roll_back(self) -> None:
        try:
            self._roll_back()
        except OSError:
            return  # Still pending: the next append or `close` tries again.

    def _start_segment(self) -> None:
        """Begin a new segment. Raises `OSError`; the old segment then stays in use."""
        offset, next_sequence, _, head_hash = self._end
        if self._sync is not None:
            # A crash must never leave a new segment after a torn one.
            self._sync.sync()
        caller_header = {key: value for key, value in self.header.items() if key != "log_id"}
        number = None if self._segment_number is None else self._segment_number + 1
        block = encode_header(str(self.header["log_id"]), next_sequence, head_hash, caller_header, number)
        durable = self.durability is Durability.DISK
        # If this fails, the new segment must not stay: the next frame may still fit into the old one.
        self._unused_segment = self.directory / segment_name(next_sequence)
        segment = write_segment(self.directory, next_sequence, block, durable=durable)
        descriptor = open_for_writing(segment, os.O_WRONLY | os.O_APPEND)
        if self._sync is not None:
            self._sync.switch(descriptor)
        left, self._descriptor = self._descriptor, descriptor
        self._segment = segment
        self._first_frame_offset, self._segment_number = len(block), number
        offset = len(block)
        self._end = (offset, next_sequence, decode_header(block, segment.name).chain_hash, head_hash)
        self._unused_segment = None
        os.close(left)
        self._note_end()
        if self._maintenance is not None:
            self._maintenance.start(self._segment, self._segment_bytes)

    def _note_end(
        self,
        num_unwritten: int | None = None,
        reason: str = "",
        *,
        is_closed: bool = False,
        expected_sequence: int | None = None,
    ) -> None:
        """Write the end record. Failures are ignored, because readers do not need the record.

        If `num_unwritten` is None, the number in the end record is kept, minus the events written since that record.
        """
        _, next_sequence, _, head_hash = self._end
        recorded = self._record.recorded
        if num_unwritten is None:  # as before, less what was written since
            num_unwritten, reason = max(0, recorded.end_sequence - next_sequence), recorded.reason
        with contextlib.suppress(OSError):
            self._record.note(
                attrs.evolve(
                    recorded,
                    segment=self._segment.name,
                    next_sequence=next_sequence,
                    head_hash=head_hash.hex(),
                    is_closed=is_closed,
                    num_unwritten=num_unwritten,
                    reason=reason,
                    expected_sequence=expected_sequence,
                )
            )

    def _remove_unused_segment(self) -> None:
        if self._unused_segment is not None:
            self._unused_segment.unlink(missing_ok=True)
            self._unused_segment = None

    def _check_open(self) -> None:
        if self._closed:
            msg = f"{self.directory}: the log was closed; create another one to append"
            raise LogClosed(msg)

    def _refuse_damage(self, reader: LogReader) -> None:
        for damage in reader.damage:
            msg = f"{self.directory / damage.segment}: {damage.kind} at offset {damage.offset}: {damage.detail}"
            raise LogDamaged(msg)


def _check_empty(directory: Path) -> None:
    if segment_paths(directory):
        msg = f"{directory} holds a log already; create the new log in another directory"
        raise LogError(msg)
