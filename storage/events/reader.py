"""Reading a log as it is: also damaged, also while another process writes it. Never locks, never writes.

Damage is no exception here: it is reported in `LogReader.damage` while iterating, and reading goes on at the next
intact frame of the segment. A frame that is yielded passed its CRC; ``chain_broken`` says that it does not follow from
what stands before it. Verified: CRC, sequence, chain, segment order, log identity. Not verified: what payloads mean,
and whether the whole log was rewritten (compare `head_hash` with one that was noted elsewhere).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs

from kvledger.storage.events.errors import LogDamaged, LogError
from kvledger.storage.events.frames import Frame, find_frame, frame_bytes, next_chain_hash, parse_frame
from kvledger.storage.events.segment_file import (
    SegmentHeader,
    decode_header,
    first_sequence_of,
    read_header,
    segment_paths,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Damage", "DamageKind", "LogReader", "read_log"]

DamageKind = Literal[
    "torn_tail", "corrupt_frame", "chain_broken", "sequence_gap", "corrupt_header", "missing_segment", "duplicate_frame"
]

_SETTLE_ATTEMPTS = 5


@attrs.frozen
class Damage:
    """One place where the log is not what was written.

    `sequence` is the first sequence number concerned, None where that cannot be known; `num_bytes` counts the bytes
    from `offset` that could not be used (0 where all could be, as in ``chain_broken``).
    """

    kind: DamageKind
    segment: str
    offset: int
    sequence: int | None
    detail: str
    num_bytes: int


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
    _log_id: str | None = attrs.field(default=None, init=False)
    retired: Damage | None = attrs.field(default=None, init=False)
    """The ``missing_segment`` before the first segment there is: whole old segments are gone, the rest is unbroken."""
    _next_segment: Path | None = attrs.field(default=None, init=False)
    """Looked up before a segment's end was read, so that nothing written in between is passed over."""
    _started: bool = attrs.field(default=False, init=False)
    _loss_reported: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        """Look for the log and read its header. Raises like `read_log`."""
        segments = self._segments()
        if not segments:
            msg = f"{self.path} holds no log segment (*.kvlog); is it the log's directory?"
            raise LogError(msg)
        for segment in segments:
            try:
                header = read_header(segment)
            except (LogDamaged, FileNotFoundError):
                continue
            self._log_id = header.log_id
            self.header = {**header.header, "log_id": header.log_id}
            return

    def __iter__(self) -> Iterator[Frame]:
        """Yield every intact frame from the one that holds `from_sequence`, and fill `damage`."""
        self.damage = []
        self.next_sequence, self.head_hash, self.chain_hash, self.tail = 1, None, None, None
        self._started, self._loss_reported, self.retired = False, False, None
        segment = self._first_segment()
        while segment is not None:
            for frame in self._frames_of(segment):
                if frame.next_sequence > self.from_sequence:
                    yield frame
            segment = self._next_segment

    def _segments(self) -> list[Path]:
        return segment_paths(self.path) if self.path.is_dir() else [self.path]

    def _first_segment(self) -> Path | None:
        """Return the last segment that begins at or before `from_sequence`, else the first one."""
        chosen: Path | None = None
        for segment in self._segments():
            if chosen is None or (first_sequence_of(segment) or 0) <= self.from_sequence:
                chosen = segment
        return chosen

    def _successor(self, segment: Path) -> Path | None:
        return next((later for later in self._segments() if later.name > segment.name), None)

    def _frames_of(self, segment: Path) -> Iterator[Frame]:
        # The successor is looked up before the bytes are read: a segment that has one is no longer written to.
        self._next_segment = successor = self._successor(segment)
        try:
            data = segment.read_bytes()
        except FileNotFoundError:
            self._report("missing_segment", segment, 0, "the segment went away while the log was read", 0)
            return
        offset = self._enter_segment(segment, data, successor)
        while offset is not None:
            frame = parse_frame(data, offset) if offset < len(data) else ""
            if isinstance(frame, Frame):
                if self._follows(frame, segment, offset):
                    yield frame
                offset += frame_bytes(frame)
                if self.tail is not None and self.tail[0] == segment:
                    self.tail = (segment, offset)
                continue
            found = find_frame(data, offset + 1, self.next_sequence, self._limit(successor))
            if found is not None:
                self._report_unreadable(segment, data, offset, found, frame)
                offset = found
                continue
            fresh, successor = self._later_bytes(segment, data, offset, successor)
            self._next_segment = successor
            if fresh is not None:
                data = fresh
                continue
            if offset < len(data):
                self._report_unreadable(segment, data, offset, None, frame, successor)
            return

    def _later_bytes(
        self, segment: Path, data: bytes, offset: int, successor: Path | None
    ) -> tuple[bytes | None, Path | None]:
        """Look again at a last segment's end: return its new bytes, None if nothing more comes, and its successor.

        The writer may be in the middle of the frame at `offset`, or may have gone on to a new segment by now.
        """
        if successor is not None:
            return None, successor
        for _ in range(_SETTLE_ATTEMPTS):
            successor = self._successor(segment)
            if successor is None and offset == len(data):
                break
            fresh = segment.read_bytes()
            if successor is not None or fresh != data:
                return fresh, successor
            time.sleep(self.settle_seconds)
        return None, None

    def _enter_segment(self, segment: Path, data: bytes, successor: Path | None) -> int | None:
        """Take up the segment's header; return the offset of its first frame, or None to leave the segment out."""
        header: SegmentHeader | None = None
        problem = ""
        try:
            header = decode_header(data, segment.name)
        except LogDamaged as error:
            problem = str(error)
        named_sequence = first_sequence_of(segment)
        if header is not None and self._log_id not in {None, header.log_id}:
            detail = f"{segment.name}: belongs to log {header.log_id}, not to {self._log_id}; left out"
            self._report("corrupt_header", segment, 0, detail, len(data))
            return None
        if header is not None and named_sequence not in {None, header.first_sequence}:
            problem = f"{segment.name}: the header says that it begins with sequence {header.first_sequence}"
        first_sequence = header.first_sequence if header is not None else named_sequence
        self._check_order(segment, first_sequence)
        if header is None or problem:
            return self._enter_without_header(segment, data, successor, problem)
        if self.next_sequence == header.first_sequence and self.chain_hash not in {None, header.previous_head_hash}:
            self._report("chain_broken", segment, 0, "the header does not follow from the segment before", 0)
        if self.tail is None:
            is_origin = header.first_sequence == 1
            self.head_hash = header.chain_hash if is_origin else header.previous_head_hash
        self.chain_hash = header.chain_hash
        self.tail = (segment, header.num_bytes)
        return header.num_bytes

    def _enter_without_header(self, segment: Path, data: bytes, successor: Path | None, problem: str) -> int | None:
        found = find_frame(data, 0, self.next_sequence, self._limit(successor))
        is_tail = found is None and successor is None and self.tail is not None
        num_bytes = len(data) if found is None else found
        self._report("torn_tail" if is_tail else "corrupt_header", segment, 0, problem, num_bytes)
        self._loss_reported = True
        self.chain_hash = None
        return found

    def _check_order(self, segment: Path, first_sequence: int | None) -> None:
        """Compare where the segment begins with where the log has come to, and go on from there."""
        is_first, self._started = not self._started, True
        if first_sequence is None:
            return
        if is_first and (first_sequence <= self.from_sequence or not self.path.is_dir()):
            self.next_sequence = first_sequence
        if first_sequence > self.next_sequence:
            if not self._loss_reported:
                lost = f"sequences {self.next_sequence} to {first_sequence - 1} are in no segment"
                self._report("missing_segment", segment, 0, lost, 0)
                self.retired = self.damage[-1] if is_first else None
            self.next_sequence, self.chain_hash = first_sequence, None
        self._loss_reported = False

    def _follows(self, frame: Frame, segment: Path, offset: int) -> bool:
        """Report where the frame does not continue the log; return False for one that must not be shown again."""
        expected = self.next_sequence
        if frame.first_sequence < expected:
            detail = f"a frame at sequence {frame.first_sequence} stands behind sequence {expected - 1}; left out"
            self._report("duplicate_frame", segment, offset, detail, frame_bytes(frame), frame.first_sequence)
            return False
        if frame.first_sequence > expected:
            if not self._loss_reported:
                detail = f"sequences {expected} to {frame.first_sequence - 1} are missing, no byte is damaged"
                self._report("sequence_gap", segment, offset, detail, 0)
        elif self.chain_hash is not None and next_chain_hash(self.chain_hash, frame) != frame.chain_hash:
            detail = f"frame {frame.first_sequence} is intact but does not follow from what stands before it"
            self._report("chain_broken", segment, offset, detail, 0)
        self._loss_reported = False
        self.head_hash = self.chain_hash = frame.chain_hash
        self.next_sequence = frame.next_sequence
        return True

    def _report_unreadable(
        self, segment: Path, data: bytes, offset: int, found: int | None, reason: str, successor: Path | None = None
    ) -> None:
        end = len(data) if found is None else found
        resumes = None if found is None else parse_frame(data, found)
        next_intact = resumes.first_sequence if isinstance(resumes, Frame) else self._limit(successor)
        if next_intact is None:
            self._report("torn_tail", segment, offset, f"{reason}; nothing intact follows", end - offset)
        else:
            lost = f"sequences {self.next_sequence} to {next_intact - 1} are lost"
            if next_intact == self.next_sequence:
                lost = "no sequence is lost"
            self._report("corrupt_frame", segment, offset, f"{reason}; {lost}", end - offset)
        self._loss_reported = True

    def _report(
        self, kind: DamageKind, segment: Path, offset: int, detail: str, num_bytes: int, sequence: int | None = None
    ) -> None:
        at = self.next_sequence if sequence is None else sequence
        self.damage.append(Damage(kind, segment.name, offset, at, detail, num_bytes))

    @staticmethod
    def _limit(successor: Path | None) -> int | None:
        return None if successor is None else first_sequence_of(successor)


def read_log(path: Path, *, from_sequence: int = 1) -> LogReader:
    """Open a log (its directory, or one segment file) for reading.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        LogError: the directory holds no segment.
        LogTooNew: the log needs a later version of kvledger.

    """
    return LogReader(Path(path), from_sequence)
