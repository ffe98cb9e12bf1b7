"""Reading a log as it is: also damaged, also while another process writes it. Never locks, never writes.

Damage is no exception here: it is reported in `LogReader.damage` while iterating, and reading goes on. What is yielded
is intact, in order, each sequence number once: a frame that stands elsewhere than where it belongs is read where it
belongs, and one that does not belong here at all is left out, both with a report. Verified: CRC, sequence, chain,
segment order, log identity. Not verified: what payloads mean, and whether the whole log was rewritten (compare
`head_hash` with one that was noted elsewhere). Memory: one frame, a window of a mebibyte, and what is noted of
misplaced frames.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from kvledger.storage.events.damage import Damage, DamageKind, sequences
from kvledger.storage.events.end_record import traces_of_log
from kvledger.storage.events.errors import LogDamaged, LogError
from kvledger.storage.events.frames import Frame, frame_bytes
from kvledger.storage.events.out_of_place import Misplaced, Stray, follows
from kvledger.storage.events.retirement import Retirement, read_retirements, retired_between
from kvledger.storage.events.segment_bytes import SegmentBytes
from kvledger.storage.events.segment_file import (
    MAX_HEADER_BYTES,
    ONE_COPY_DAMAGED,
    SegmentHeader,
    decode_header,
)
from kvledger.storage.events.segment_order import OrderedSegment, SegmentOrder

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Damage", "DamageKind", "LogReader", "read_log"]

_SETTLE_ATTEMPTS = 5


@attrs.define(eq=False)
class LogReader:
    """The frames of a log; iterate to read, then look at `damage`. Each iteration starts anew.

    `header` is the mapping given by the log's creator and `log_id`; empty if no header can be read. After an iteration
    `next_sequence`, `head_hash` and `tail` say where the intact log ends.
    """

    path: Path
    from_sequence: int = 1
    settle_seconds: float = 0.005
    """Pause before a torn tail is looked at again: it may be a frame that is being written."""
    header: dict[str, object] = attrs.field(factory=dict, init=False)
    damage: list[Damage] = attrs.field(factory=list, init=False)
    next_sequence: int = attrs.field(default=1, init=False)
    head_hash: bytes | None = attrs.field(default=None, init=False)
    chain_hash: bytes | None = attrs.field(default=None, init=False)
    """What the next frame must follow from: `head_hash`, or the hash of a newer segment's header. None: not known."""
    tail: tuple[Path, int] | None = attrs.field(default=None, init=False)
    """The last segment with a good header, and the offset behind its last intact frame."""
    place: tuple[str, int] = attrs.field(default=("", 0), init=False)
    """Segment and offset of the frame that was yielded last."""
    unreadable_end: Damage | None = attrs.field(default=None, init=False)
    """The damage that reaches to the end of the log, where there is one: what a crash may have left."""
    retired: list[Retirement] = attrs.field(factory=list, init=False)
    """Segments that are gone and recorded as retired, which is no damage: those before the first one read, and any that
    went while the log was read."""
    _order: SegmentOrder = attrs.field(init=False)
    _segment: OrderedSegment | None = attrs.field(default=None, init=False)
    """The one that is read now."""
    _successor: OrderedSegment | None = attrs.field(default=None, init=False)
    """Looked up before a segment's end was read, so that nothing written in between is passed over."""
    _number: int | None = attrs.field(default=None, init=False)
    """The number of the segment in use, where its header says."""
    _started: bool = attrs.field(default=False, init=False)
    _loss_reported: bool = attrs.field(default=False, init=False)
    _is_copy: bool = attrs.field(default=False, init=False)
    """Whether the segment in use is a second copy, whose frames need no report of their own."""
    _misplaced: Misplaced = attrs.field(factory=Misplaced, init=False)

    def __attrs_post_init__(self) -> None:
        """Look for the log and read its header. Raises like `read_log`."""
        self._order = SegmentOrder(self.path)
        if not self._order.refresh():
            traces = traces_of_log(self.path)
            question = f"they are missing: {traces}" if traces else "is it the log's directory?"
            msg = f"{self.path} holds no log segment (*.kvlog); {question}"
            raise LogError(msg)
        header = self._order.header()
        if header is not None:
            self.header = {**header.header, "log_id": header.log_id}

    def __iter__(self) -> Iterator[Frame]:
        """Yield every intact frame from the one that holds `from_sequence`, and fill `damage`."""
        self.damage, self._misplaced = [], Misplaced()
        self.next_sequence, self.head_hash, self.chain_hash, self.tail = 1, None, None, None
        self._started, self._loss_reported, self._number = False, False, None
        self.retired, self.unreadable_end = [], None
        self._segment = self._order.beginning_at(self.from_sequence)
        self._report_foreign_segments()
        while self._segment is not None:
            for frame in self._frames_of(self._segment):
                if frame.next_sequence > self.from_sequence:
                    yield frame
            self._segment = self._successor
        for stray in self._misplaced.strays:
            self._report_left_out(stray)

    @property
    def first_sequence(self) -> int | None:
        """The sequence number with which the first segment there is begins; None where nothing tells."""
        first = self._order.beginning_at(1)
        return None if first is None else first.first_sequence

    # --- segments ----------------------------------------------------------------------------------------------------

    def _report_foreign_segments(self) -> None:
        for path, header, num_bytes in self._order.foreign():
            detail = f"belongs to log {header.log_id}, not to {self._order.log_id()}; left out"
            self._report("foreign_segment", path, 0, detail, num_bytes, header.first_sequence)

    def _frames_of(self, segment: OrderedSegment) -> Iterator[Frame]:
        # The successor is looked up before the bytes are read: a segment that has one is no longer written to.
        self._successor = self._order.successor(segment)
        try:
            data = SegmentBytes(segment.path)
        except FileNotFoundError:
            self._order.refresh()
            self._successor = self._order.successor(segment)
            return
        with data:
            offset = self._enter_segment(segment, data)
            while offset is not None:
                frame = data.frame_at(offset) if offset < data.num_bytes else ""
                if not isinstance(frame, Frame):
                    offset = self._behind_unreadable(segment, data, offset, frame)
                    continue
                end = offset + frame_bytes(frame)
                self.place = (segment.path.name, offset)
                if follows(frame, self.next_sequence, self.chain_hash):
                    self._go_on_behind(frame)
                    yield frame
                else:
                    yield from self._out_of_place(frame, Stray.of(frame, segment.path, offset), data, end)
                if self.tail is not None and self.tail[0] == segment.path:
                    self.tail = (segment.path, end)
                if self._misplaced.strays:
                    for stray in self._misplaced.let_go(self.next_sequence):
                        self._report_left_out(stray)
                offset = end
            if self.chain_hash is not None:
                yield from self._from_elsewhere(segment)

    def _behind_unreadable(self, segment: OrderedSegment, data: SegmentBytes, offset: int, reason: str) -> int | None:
        """Go on behind bytes that are no frame: return where, or None at the end of the segment."""
        found = data.find_frame(offset + 1, self.next_sequence, self._limit)
        if found is None and self._more_comes(segment, data, offset):
            return offset
        if found is not None or offset < data.num_bytes:
            self._report_unreadable(segment.path, data, offset, found, reason)
        return found

    def _more_comes(self, segment: OrderedSegment, data: SegmentBytes, offset: int) -> bool:
        """Look again at a last segment's end, and for its successor; return whether to read on.

        The writer may be in the middle of the frame at `offset`, or may have gone on to a new segment by now.
        """
        if self._successor is not None:
            return False
        for _ in range(_SETTLE_ATTEMPTS):
            self._successor = self._order.successor(segment)
            if self._successor is None and offset == data.num_bytes:
                return False
            if data.has_changed(offset) or self._successor is not None:
                return True
            time.sleep(self.settle_seconds)
        return False

    def _enter_segment(self, segment: OrderedSegment, data: SegmentBytes) -> int | None:
        """Take up the segment's header; return the offset of its first frame, or None if there is none."""
        header: SegmentHeader | None = None
        problem = ""
        try:
            header = decode_header(data.read(0, MAX_HEADER_BYTES), segment.path.name, any_copy=True)
        except LogDamaged as error:
            problem = str(error)
        self._check_order(segment, header)
        self._is_copy = header is not None and header.first_sequence < self.next_sequence
        if header is None:
            return self._enter_without_header(segment.path, data, problem)
        start = self._first_frame_behind(segment.path, data, header)
        if segment.is_renamed:
            detail = f"the header says that it begins with sequence {header.first_sequence}; read there"
            self._report("renamed_segment", segment.path, 0, detail, 0, header.first_sequence)
        if self._is_copy:
            detail = f"begins with sequence {header.first_sequence} like one before; what was read is left out"
            self._report("duplicate_segment", segment.path, 0, detail, data.num_bytes, header.first_sequence)
            return start
        if self.next_sequence == header.first_sequence and self.chain_hash not in {None, header.previous_head_hash}:
            self._report("chain_broken", segment.path, 0, "the header does not follow from the segment before", 0)
        if self.tail is None:
            is_origin = header.first_sequence == 1
            self.head_hash = header.chain_hash if is_origin else header.previous_head_hash
        self.chain_hash, self._number = header.chain_hash, header.segment_number
        self.tail = (segment.path, start)
        return start

    def _first_frame_behind(self, segment: Path, data: SegmentBytes, header: SegmentHeader) -> int:
        """Where the frames begin; reports a damaged copy of the header."""
        if header.damaged_at is None:
            return header.num_bytes
        start = header.num_bytes
        if header.damaged_at > 0:
            # Bytes may be missing there, so a frame may stand where the copy should.
            found = data.find_frame(header.damaged_at, header.first_sequence, self._limit)
            start = start if found is None else min(found, start)
        self._report(
            "corrupt_header", segment, header.damaged_at, ONE_COPY_DAMAGED, header.copy_bytes, header.first_sequence
        )
        return start

    def _enter_without_header(self, segment: Path, data: SegmentBytes, problem: str) -> int | None:
        found = data.find_frame(0, self.next_sequence, self._limit)
        is_tail = found is None and self._successor is None and self.tail is not None
        num_bytes = data.num_bytes if found is None else found
        self._report("torn_tail" if is_tail else "corrupt_header", segment, 0, problem, num_bytes)
        if is_tail:
            self.unreadable_end = self.damage[-1]
        self._loss_reported = True
        self.chain_hash = self._number = None
        return found

    def _check_order(self, segment: OrderedSegment, header: SegmentHeader | None) -> None:
        """Compare where the segment begins with where the log has come to, and go on from there."""
        was_started, self._started = self._started, True
        first_sequence = segment.first_sequence
        if first_sequence is None:  # one file alone, without a header and without a segment's name
            return
        if not was_started and (first_sequence <= self.from_sequence or not self._order.is_directory):
            self.next_sequence = first_sequence
        if first_sequence > self.next_sequence:
            if not self._loss_reported:
                self._account_for_missing(segment.path, first_sequence, header)
            self.next_sequence, self.chain_hash = first_sequence, None
        self._loss_reported = False

    @property
    def _limit(self) -> int | None:
        """The sequence number with which the next segment begins."""
        return None if self._successor is None else self._successor.first_sequence

    # --- frames ------------------------------------------------------------------------------------------------------

    def _go_on_behind(self, frame: Frame) -> None:
        self._loss_reported = False
        self.head_hash = self.chain_hash = frame.chain_hash
        self.next_sequence = frame.next_sequence

    def _out_of_place(self, frame: Frame, stray: Stray, data: SegmentBytes, end: int) -> Iterator[Frame]:
        """Judge an intact frame that does not follow: show it, with a report, or put it aside, or leave it out."""
        if self._misplaced.was_taken(stray.segment, stray.offset):
            return
        if self.chain_hash is not None and frame.first_sequence >= self.next_sequence:
            if self._misplaced.is_still_to_come(stray.segment, data, end, self.next_sequence, self.chain_hash):
                self._misplaced.strays.append(stray)
                return
            if self._segment is not None:
                yield from self._from_elsewhere(self._segment, stray)
        self.place = (stray.segment.name, stray.offset)
        if follows(frame, self.next_sequence, self.chain_hash):
            self._go_on_behind(frame)
            yield frame
        elif frame.first_sequence < self.next_sequence:
            if not self._is_copy:
                self._report_left_out(stray)
        elif self._segment_is_whole:
            self._misplaced.strays.append(stray)
        elif self._may_be_shown(frame, stray, next(data.frames(end), None)):
            self._go_on_behind(frame)
            yield frame

    @property
    def _segment_is_whole(self) -> bool:
        """Whether everything before the next segment was read, so that a further frame belongs elsewhere."""
        return self.chain_hash is not None and self.next_sequence == self._limit

    def _may_be_shown(self, frame: Frame, stray: Stray, behind: tuple[int, Frame] | None) -> bool:
        """Judge a frame while nothing is found anywhere that does follow."""
        expected, is_contradicted = self.next_sequence, self._is_contradicted(frame, behind)
        if frame.first_sequence == expected:
            if is_contradicted:
                detail = (
                    f"{sequences(expected, frame.next_sequence)} are lost: in their place is an intact frame that "
                    "neither follows from what stands before it nor leads to what stands behind it"
                )
                self._report("foreign_frame", stray.segment, stray.offset, detail, stray.num_bytes)
                self._loss_reported = True
                return False
            detail = f"frame {expected} is intact but does not follow from what stands before it"
            self._report("chain_broken", stray.segment, stray.offset, detail, 0)
            return True
        if is_contradicted and behind is not None and behind[1].first_sequence <= frame.next_sequence:
            self._misplaced.strays.append(stray)
            return False
        if not self._loss_reported:
            detail = f"{sequences(expected, frame.first_sequence)} are missing, no byte is damaged"
            self._report("sequence_gap", stray.segment, stray.offset, detail, 0)
        return True

    def _is_contradicted(self, frame: Frame, behind: tuple[int, Frame] | None) -> bool:
        """Whether what stands behind `frame`, a frame or the next segment, follows from something else."""
        if behind is not None:
            return not follows(behind[1], frame.next_sequence, frame.chain_hash)
        header = None if self._successor is None else self._order.header_of(self._successor.path)
        if header is None or header.first_sequence != frame.next_sequence:
            return False
        return header.previous_head_hash != frame.chain_hash

    def _from_elsewhere(self, segment: OrderedSegment, judged: Stray | None = None) -> Iterator[Frame]:
        """Read what follows and was put aside, or stands in a later segment, as long as there is something.

        Looked at: the next segment, and those from which frames were seen that stand here instead.
        """
        while not (judged is None and self._segment_is_whole):
            taken, where = self._misplaced.take_stray(self.next_sequence, self.chain_hash), "before"
            if taken is None and not self._segment_is_whole:
                seen = [*self._misplaced.strays, *([] if judged is None else [judged])]
                holders = [self._successor, *(self._order.holder_of(stray.first_sequence) for stray in seen)]
                later = [each.path for each in holders if each is not None and each.place > segment.place]
                taken = self._misplaced.take_from(dict.fromkeys(later), self.next_sequence, self.chain_hash)
                where = "behind"
            if taken is None:
                return
            stray, frame = taken
            self._report_moved(stray, where)
            self.place = (stray.segment.name, stray.offset)
            self._go_on_behind(frame)
            yield frame

    # --- reports -----------------------------------------------------------------------------------------------------

    def _account_for_missing(self, segment: Path, first_sequence: int, header: SegmentHeader | None) -> None:
        """Sequences are in no segment: they were retired, which a record tells, or something is wrong."""
        records = read_retirements(self.path)
        retired = retired_between(records, self._order.log_id(), self.next_sequence, first_sequence)
        if retired is not None:
            self.retired += retired
            if header is not None and header.previous_head_hash.hex() != retired[-1].head_hash:
                detail = f"the header does not follow from the hash recorded when {retired[-1].segment} was retired"
                self._report("chain_broken", segment, 0, detail, 0, first_sequence)
            return
        lost = f"{sequences(self.next_sequence, first_sequence)} are in no segment"
        number = None if header is None else header.segment_number
        if number is not None and self._number == number - 1 and self.tail is not None:
            detail = f"cut behind a frame: {lost}, and the next segment is the one that followed"
            self._report("cut_segment", self.tail[0], self.tail[1], detail, 0)
            return
        self._report("missing_segment", segment, 0, f"{lost}, and no record says that they were retired", 0)

    def _report_unreadable(
        self, segment: Path, data: SegmentBytes, offset: int, found: int | None, reason: str
    ) -> None:
        num_bytes = (data.num_bytes if found is None else found) - offset
        resumes = None if found is None else data.frame_at(found)
        next_intact = resumes.first_sequence if isinstance(resumes, Frame) else self._limit
        if next_intact is None:
            kind: DamageKind = "corrupt_frame" if data.ends_with_whole_frame(offset) else "torn_tail"
            self._report(kind, segment, offset, f"{reason}; nothing intact follows", num_bytes)
            self.unreadable_end = self.damage[-1]
        else:
            is_lost = next_intact > self.next_sequence
            lost = f"{sequences(self.next_sequence, next_intact)} are lost" if is_lost else "no sequence is lost"
            self._report("corrupt_frame", segment, offset, f"{reason}; {lost}", num_bytes)
            if is_lost:
                self.chain_hash = None
        self._loss_reported = True

    def _report_left_out(self, stray: Stray) -> None:
        """Report a frame that is not read: a copy of one that stands elsewhere, or nobody knows whose."""
        numbers = sequences(stray.first_sequence, stray.next_sequence)
        holder = self._order.holder_of(stray.first_sequence)
        if self._misplaced.is_copy(stray, None if holder is None else holder.path):
            kind: DamageKind = "duplicate_frame"
            detail = f"a copy of the frame of {numbers}, which stands elsewhere; left out"
        else:
            kind, detail = "foreign_frame", f"claims {numbers} and follows from nothing in this log; left out"
        self._report(kind, stray.segment, stray.offset, detail, stray.num_bytes, stray.first_sequence)

    def _report_moved(self, stray: Stray, where: str) -> None:
        last = self.damage[-1] if self.damage else None
        is_next = last is not None and (last.kind, last.segment, last.offset + last.num_bytes) == (
            "reordered_frames",
            stray.segment.name,
            stray.offset,
        )
        if last is not None and is_next and last.sequence is not None:
            # Neighbours that were moved together are one report.
            detail = f"the frames of {sequences(last.sequence, stray.next_sequence)} stand {where} their place"
            self.damage[-1] = attrs.evolve(last, num_bytes=last.num_bytes + stray.num_bytes, detail=detail)
            return
        detail = f"the frame of {sequences(stray.first_sequence, stray.next_sequence)} stands {where} its place"
        self._report("reordered_frames", stray.segment, stray.offset, detail, stray.num_bytes, stray.first_sequence)

    def _report(
        self, kind: DamageKind, segment: Path, offset: int, detail: str, num_bytes: int, sequence: int | None = None
    ) -> None:
        at = self.next_sequence if sequence is None else sequence
        self.damage.append(Damage(kind, segment.name, offset, at, detail, num_bytes))


def read_log(path: Path, *, from_sequence: int = 1) -> LogReader:
    """Open a log (its directory, or one segment file) for reading.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        LogError: the directory holds no segment.
        LogTooNew: the log needs a later version of kvledger.

    """
    return LogReader(Path(path), from_sequence)
