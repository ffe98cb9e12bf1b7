"""Read a log as it is, even if it is damaged or being written. Takes no lock and writes nothing.

Damage raises no exception. It is added to `LogReader.damage`, and reading continues after it. Only intact frames are
yielded, in order, and each sequence number at most once. In memory, the reader keeps one frame, and a part of the file:
1 MiB or one compressed block.

The reader verifies CRCs, sequence numbers and chain hashes. It also verifies that each segment belongs to this log and
has the file name that follows from its header. It does not verify what payloads mean, or whether somebody rewrote the
whole log. To detect a rewritten log, compare `head_hash` with a hash that was recorded outside the log.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from kvledger.storage.events.damage import Damage, DamageKind, sequences
from kvledger.storage.events.end_record import END_RECORD_NAME, read_end_record
from kvledger.storage.events.files import num_bytes_of
from kvledger.storage.events.frames import Frame, follows, frame_bytes
from kvledger.storage.events.retirements import (
    RETIREMENTS_NAME,
    Retirement,
    last_retirement,
    read_retirements,
    retired_between,
)
from kvledger.storage.events.segment_bytes import SegmentBytes
from kvledger.storage.events.segment_file import (
    ONE_COPY_DAMAGED,
    SegmentHeader,
    first_sequence_of,
    read_header,
    segment_name,
    segment_paths,
)
from kvledger.storage.events.store import LogDamaged, LogError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Damage", "DamageKind", "LogReader", "frames_from", "read_log", "traces_of_log"]

_SETTLE_ATTEMPTS = 5


@attrs.define(eq=False)
class LogReader:
    """The frames of a log. Iterate over the reader, then look at `damage`. Each iteration reads the log again.

    `header` is the mapping given by the log's creator, plus `log_id`. It is empty if no header can be read. After an
    iteration, `next_sequence`, `head_hash` and `tail` describe the place after the last intact frame.
    """

    path: Path
    from_sequence: int = 1
    settle_seconds: float = 0.005
    """Seconds to wait before an incomplete last frame is read again, because the writer may be about to complete it."""
    header: dict[str, object] = attrs.field(factory=dict, init=False)
    damage: list[Damage] = attrs.field(factory=list, init=False)
    next_sequence: int = attrs.field(default=1, init=False)
    head_hash: bytes | None = attrs.field(default=None, init=False)
    chain_hash: bytes | None = attrs.field(default=None, init=False)
    """Chain hash that the next frame must continue: `head_hash`, or the hash of a segment header that was read after
    the last frame. None: unknown."""
    tail: tuple[Path, int] | None = attrs.field(default=None, init=False)
    """The last segment that has an intact header, and the offset after the segment's last intact frame."""
    place: tuple[str, int] = attrs.field(default=("", 0), init=False)
    """Name of the segment and offset of the frame that was yielded last."""
    retired: list[Retirement] = attrs.field(factory=list, init=False)
    """Missing segments that `retired.jsonl` names as retired. Their absence is not damage. They were before the first
    segment that was read, or were deleted during the reading."""
    _log_id: str | None = attrs.field(default=None, init=False)
    """The log id that most headers have. If several ids are equally frequent, the one in the earliest segment."""
    _headers: dict[Path, SegmentHeader | str] = attrs.field(factory=dict, init=False)
    """Segment → its header, or why the header cannot be read. Unreadable headers are read again, because the writer
    may complete them."""
    _segments: list[Path] = attrs.field(factory=list, init=False)
    _successor: Path | None = attrs.field(default=None, init=False)
    """The segment after the current one. It is looked up before the end of the current segment is read, so that no
    frame is missed if the writer begins a segment meanwhile."""

    def __attrs_post_init__(self) -> None:
        """Find the log and read its headers. Raises the errors of `read_log`."""
        self._list_segments()
        if not self._segments:
            traces = traces_of_log(self.path)
            missing = f"segments are missing: {traces}; restore them from a copy, or delete the directory"
            question = missing if traces else "give the log's own directory"
            msg = f"{self.path} holds no log segment (*.kvlog); {question}"
            raise LogError(msg)
        header = next((found for each in self._segments if (found := self._header_of(each)) is not None), None)
        if header is not None:
            self.header = {**header.header, "log_id": header.log_id}

    def __iter__(self) -> Iterator[Frame]:
        """Yield every intact frame, beginning with the frame of event `from_sequence`, and fill `damage`."""
        self.damage, self.retired = [], []
        self.next_sequence, self.head_hash, self.chain_hash, self.tail = 1, None, None, None
        self._list_segments()
        self._report_misplaced_segments()
        begun = [each for each in self._segments if (self._begins(each) or 0) <= self.from_sequence]
        segment: Path | None = begun[-1] if begun else next(iter(self._segments), None)
        if segment is not None and (begun or self.path == segment):
            self.next_sequence = self._begins(segment) or 1
        while segment is not None:
            for frame in self._frames_of(segment):
                if frame.next_sequence > self.from_sequence:
                    yield frame
            segment = self._successor

    @property
    def first_sequence(self) -> int | None:
        """First sequence number of the log's first existing segment; None: unknown."""
        self._list_segments()
        return self._begins(self._segments[0]) if self._segments else None

    # --- segments ----------------------------------------------------------------------------------------------------

    def _list_segments(self) -> None:
        """List the segments of this log, without misplaced files (`_misplaced`). Raises `LogTooNew` and `OSError`."""
        if not self.path.is_dir():
            self._segments = [self.path]
            self._read_header(self.path)
            return
        paths = [path for path in segment_paths(self.path) if self._read_header(path)]
        if self._log_id is None:
            counted = Counter(header.log_id for path in paths if (header := self._header_of(path)) is not None)
            self._log_id = counted.most_common(1)[0][0] if counted else None
        self._segments = [path for path in paths if not self._misplaced(path)]

    def _read_header(self, segment: Path) -> bool:
        """Read the header of `segment` if it is not known yet. Return whether the file exists."""
        if self._header_of(segment) is None:
            try:
                self._headers[segment] = read_header(segment, any_copy=True)
            except LogDamaged as error:
                self._headers[segment] = str(error)
            except FileNotFoundError:
                if segment == self.path:
                    raise
                return False  # retired since the directory was listed
        return True

    def _header_of(self, segment: Path) -> SegmentHeader | None:
        header = self._headers.get(segment)
        return header if isinstance(header, SegmentHeader) else None

    def _begins(self, segment: Path) -> int | None:
        """Return a segment's first sequence number from its header, or else from its name. None: neither states it."""
        header = self._header_of(segment)
        return first_sequence_of(segment) if header is None else header.first_sequence

    def _misplaced(self, segment: Path) -> str:
        """Return why a file is not a segment of this log. Empty if the file is one, or if its header cannot be read."""
        header = self._header_of(segment)
        if header is None:
            return ""
        if header.log_id != self._log_id:
            return f"the segment belongs to log {header.log_id}, not to log {self._log_id}, and is left out"
        if header.first_sequence != first_sequence_of(segment):
            return (
                f"by its header, the file's name should be {segment_name(header.first_sequence)}; the file is left out "
                "until you rename it"
            )
        return ""

    def _report_misplaced_segments(self) -> None:
        for segment in segment_paths(self.path) if self.path.is_dir() else []:
            why = self._misplaced(segment)
            if why:
                self._report("misplaced_segment", segment, 0, why, num_bytes_of(segment), self._begins(segment))

    def _behind(self, segment: Path) -> Path | None:
        """Return the segment after `segment`, or None. List the directory again if no later segment is known."""
        for is_listed_anew in (False, True):
            if is_listed_anew:
                self._list_segments()
            for other in self._segments:
                if other.name > segment.name:
                    return other
        return None

    @property
    def _limit(self) -> int | None:
        """First sequence number of the segment after the current one; None: unknown."""
        return None if self._successor is None else self._begins(self._successor)

    def _frames_of(self, segment: Path) -> Iterator[Frame]:
        # Looked up first: a segment that has a successor is no longer written to.
        self._successor = self._behind(segment)
        try:
            data = SegmentBytes(segment)
        except FileNotFoundError:  # retired since it was listed
            self._list_segments()
            self._successor = self._behind(segment)
            return
        with data:
            offset = self._enter_segment(segment, data)
            while offset is not None:
                for at, frame in data.frames(offset, self.next_sequence, self.chain_hash):
                    self.place, offset = (segment.name, at), at + frame_bytes(frame)
                    self.head_hash = self.chain_hash = frame.chain_hash
                    self.next_sequence = frame.next_sequence
                    yield frame
                if self.tail is not None and self.tail[0] is segment:
                    self.tail = (segment, offset)
                offset = self._behind_damage(segment, data, offset)

    def _enter_segment(self, segment: Path, data: SegmentBytes) -> int | None:
        """Check a segment's header and report its damage. Return the offset of the first frame; None: no frame."""
        header, begins = self._header_of(segment), self._begins(segment)
        if begins is not None and begins > self.next_sequence:
            self._account_for_missing(segment, begins, header)
            self.next_sequence, self.chain_hash = begins, None
        if header is None:
            return self._enter_without_header(segment, data)
        start = header.num_bytes
        if header.damaged_at is not None:
            # A damaged second copy may be too short, so that the first frame begins earlier.
            found = data.find_frame(header.damaged_at, header.first_sequence, self._limit)
            if header.damaged_at > 0 and found is not None:
                start = min(found[0], start)
            self._report("corrupt_header", segment, header.damaged_at, ONE_COPY_DAMAGED, header.num_bytes // 2, begins)
        if self.chain_hash not in {None, header.previous_head_hash}:
            self._report("chain_broken", segment, 0, "the header does not state the previous segment's last hash", 0)
        if self.tail is None:
            self.head_hash = header.chain_hash if header.first_sequence == 1 else header.previous_head_hash
        self.chain_hash, self.tail = header.chain_hash, (segment, start)
        return start

    def _enter_without_header(self, segment: Path, data: SegmentBytes) -> int | None:
        found = data.find_frame(0, self.next_sequence, self._limit)
        is_tail = found is None and self._successor is None and self.tail is not None
        offset, reached = (data.num_bytes, self._limit) if found is None else (found[0], found[1].first_sequence)
        kind: DamageKind = "torn_tail" if is_tail else "corrupt_header"
        self._report(kind, segment, 0, str(self._headers[segment]), offset)
        self.next_sequence, self.chain_hash = reached or self.next_sequence, None
        return None if found is None else offset

    def _account_for_missing(self, segment: Path, first_sequence: int, header: SegmentHeader | None) -> None:
        """Look up whether the missing events before `first_sequence` were retired. If not, report them as damage."""
        records = read_retirements(self.path)
        retired = retired_between(records, self._log_id, self.next_sequence, first_sequence)
        if retired is not None:
            self.retired += retired
            if header is not None and header.previous_head_hash.hex() != retired[-1].head_hash:
                detail = f"the header does not state the hash recorded when {retired[-1].segment} was retired"
                self._report("chain_broken", segment, 0, detail, 0, first_sequence)
            return
        lost = f"{sequences(self.next_sequence, first_sequence)} are in no segment"
        before = None if self.tail is None else self._header_of(self.tail[0])
        numbers = [None if each is None else each.segment_number for each in (before, header)]
        if self.tail is not None and numbers[0] is not None and numbers[1] == numbers[0] + 1:
            detail = f"cut at the end of a frame: {lost}, but the segments' numbers show that no segment is missing"
            self._report("cut_segment", self.tail[0], self.tail[1], detail, 0)
            return
        self._report("missing_segment", segment, 0, f"{lost}, and no record says that they were retired", 0)

    # --- damage ------------------------------------------------------------------------------------------------------

    def _behind_damage(self, segment: Path, data: SegmentBytes, offset: int) -> int | None:
        """Report damage at `offset`, where the intact frames end. Report nothing if the segment ends or grows there.

        Return the offset at which to continue in this segment; None: no intact frame follows in it.
        """
        found = self._credible_frame(data, offset)
        if found is None:
            if self._more_comes(segment, data, offset):
                return offset
            if offset == data.num_bytes:
                return None
        end, reached = (data.num_bytes, self._limit) if found is None else (found[0], found[1].first_sequence)
        there, is_lost = data.frame_at(offset), reached is not None and reached > self.next_sequence
        lost = f"{sequences(self.next_sequence, reached)} are lost" if reached and is_lost else "no sequence is lost"
        if trouble := data.block_trouble(offset):
            kind: DamageKind = "corrupt_block"
            detail = f"{trouble}; {lost}"
        elif isinstance(there, str):
            is_torn = reached is None and not data.ends_with_whole_frame(offset)
            kind = "torn_tail" if is_torn else "corrupt_frame"
            detail = f"{there}; {'nothing intact follows' if reached is None else lost}"
        elif end > offset:
            kind, claims = "chain_broken", sequences(there.first_sequence, there.next_sequence)
            detail = f"the frame of {claims} does not continue the frame before it and is left out; {lost}"
        elif is_lost:
            kind, detail = "sequence_gap", f"{lost}, but no byte is damaged"
        else:
            kind, detail = "chain_broken", "the frame is intact but does not continue the frame before it"
        self._report(kind, segment, offset, detail, end - offset)
        if reached is not None and (is_lost or end == offset):
            self.next_sequence, self.chain_hash = reached, None
        return None if found is None else end

    def _credible_frame(self, data: SegmentBytes, offset: int) -> tuple[int, Frame] | None:
        """Return the offset of the first credible frame at or after `offset`, and the frame. None: there is none.

        A frame is credible if it continues the frame that was read last. Any other frame is credible if both are true:

        - Its sequence number is smaller than the first sequence number of the next segment.
        - The frame or segment header directly after it does not contradict it.
        """
        while (found := data.find_frame(offset, self.next_sequence, self._limit)) is not None:
            at, frame = found
            offset = at + frame_bytes(frame)
            is_known = self.chain_hash is not None and follows(frame, self.next_sequence, self.chain_hash)
            if is_known or not self._is_contradicted(frame, data, offset):
                return found
        return None

    def _is_contradicted(self, frame: Frame, data: SegmentBytes, end: int) -> bool:
        """Whether `frame` is directly followed by a frame or segment header that does not continue `frame`."""
        behind = data.frame_at(end) if end < data.num_bytes else ""
        if isinstance(behind, Frame):
            return not follows(behind, frame.next_sequence, frame.chain_hash)
        header = None if self._successor is None or end < data.num_bytes else self._header_of(self._successor)
        if header is None or header.first_sequence != frame.next_sequence:
            return False
        return header.previous_head_hash != frame.chain_hash

    def _more_comes(self, segment: Path, data: SegmentBytes, offset: int) -> bool:
        """Wait shortly for the log's writer. Return whether the last segment has grown or a new segment has begun.

        The writer may be about to complete the frame at `offset`, or may have begun a new segment.
        """
        if self._successor is not None:
            return False
        for _ in range(_SETTLE_ATTEMPTS):
            self._successor = self._behind(segment)
            if self._successor is None and offset == data.num_bytes:
                return False
            if data.has_changed(offset) or self._successor is not None:
                return True
            time.sleep(self.settle_seconds)
        return False

    def _report(
        self, kind: DamageKind, segment: Path, offset: int, detail: str, num_bytes: int, sequence: int | None = None
    ) -> None:
        at = self.next_sequence if sequence is None else sequence
        self.damage.append(Damage(kind, segment.name, offset, at, detail, num_bytes))


def read_log(path: Path, *, from_sequence: int = 1) -> LogReader:
    """Open a log for reading. `path` is the log's directory, or one segment file.

    Raises:
        FileNotFoundError: `path` does not exist.
        LogError: the directory has no segment.
        LogTooNew: the log needs a newer version of kvledger.

    """
    return LogReader(Path(path), from_sequence)


def traces_of_log(directory: Path) -> str:
    """Return in words which segments a directory without segments once had.

    The end record or the record of retirements shows this. The text is empty if neither names a segment, or if the
    whole log was retired. Raises `OSError`.
    """
    name = directory.absolute().name
    recorded = read_end_record(directory)
    if recorded is not None:
        trace = f"{END_RECORD_NAME} names {recorded.segment} and events up to {recorded.end_sequence - 1}"
    else:
        # A directory of logs has this file, too, for its vanished logs.
        retired = [each for each in read_retirements(directory) if each.log == name]
        trace = f"{RETIREMENTS_NAME} names events up to {retired[-1].last_sequence}" if retired else ""
    # Checked last: a user may not be allowed to read the directory above.
    if trace and (
        last_retirement(directory) is not None
        or any(each.log == name for each in read_retirements(directory.absolute().parent))
    ):
        return ""
    return trace


def frames_from(path: Path, segment: str, offset: int) -> Iterator[tuple[Frame, str, int]]:
    """Yield the frames of the log at `path`, each with its segment's name and its offset.

    The first frame is the one at `offset` of `segment`. The iteration ends at the first frame that is not intact or
    does not continue the frame before. It reports no damage.
    """
    sequence: int | None = None
    chain_hash: bytes | None = None
    for file in segment_paths(path) if path.is_dir() else [path]:
        if file.name < segment:
            continue
        try:
            header = read_header(file, any_copy=True)
        except (LogError, FileNotFoundError):
            return
        if file.name != segment:
            if sequence not in {None, header.first_sequence}:
                return
            offset, chain_hash = header.num_bytes, header.chain_hash
        with SegmentBytes(file) as data:
            for at, frame in data.frames(offset, sequence, chain_hash):
                yield frame, file.name, at
                sequence = frame.next_sequence
