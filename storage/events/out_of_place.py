"""Frames that do not stand where they belong: moved, copied, or put there by somebody else.

The chain tells which: exactly one frame follows from what stands before it. A frame that does not is put aside while
the one that does is still to come, and is then read in its place, or is known as a copy or as foreign. What is kept of
a frame that was put aside is where it stands; of what lies ahead, 65,536 frames are looked at.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import attrs

from kvledger.storage.events.frames import Frame, frame_bytes, next_chain_hash
from kvledger.storage.events.segment_bytes import SegmentBytes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["FramesAhead", "Misplaced", "Stray", "follows"]

_MAX_FRAMES_AHEAD: Final = 65_536


def follows(frame: Frame, sequence: int, chain_hash: bytes | None) -> bool:
    """Whether `frame` is the one that comes at `sequence` behind `chain_hash` (16 bytes; None: any does)."""
    if frame.first_sequence != sequence:
        return False
    return chain_hash is None or next_chain_hash(chain_hash, frame) == frame.chain_hash


@attrs.frozen
class Stray:
    """Where a frame stands that does not belong there, without its payload."""

    segment: Path
    offset: int
    num_bytes: int
    first_sequence: int
    num_events: int
    chain_hash: bytes

    @property
    def next_sequence(self) -> int:
        """The sequence number of the first event after the frame."""
        return self.first_sequence + self.num_events

    @classmethod
    def of(cls, frame: Frame, segment: Path, offset: int) -> Stray:
        """Note where `frame` stands."""
        return cls(segment, offset, frame_bytes(frame), frame.first_sequence, frame.num_events, frame.chain_hash)

    def load(self) -> Frame | None:
        """Read the frame again; None if it is gone meanwhile."""
        try:
            with SegmentBytes(self.segment) as data:
                frame = data.frame_at(self.offset)
        except FileNotFoundError:
            return None
        return frame if isinstance(frame, Frame) and frame.chain_hash == self.chain_hash else None


@attrs.define(eq=False)
class FramesAhead:
    """What comes behind a place in one segment, so that asking many times reads it once."""

    _segment: Path | None = None
    _offsets: dict[int, list[int]] = attrs.field(factory=dict)
    _start: int = 0
    _asked_again_from: int = 0
    """Behind this offset too little of what lies ahead is known, unless it was read to the end."""

    def find(
        self, segment: Path, data: SegmentBytes, start: int, sequence: int, chain_hash: bytes | None
    ) -> tuple[int, Frame] | None:
        """Return the frame at or behind `start` that comes at `sequence` behind `chain_hash`, with its offset."""
        if segment != self._segment or not self._start <= start <= self._asked_again_from:
            self._read(segment, data, start)
        for offset in self._offsets.get(sequence, ()):
            frame = data.frame_at(offset) if offset >= start else ""
            if isinstance(frame, Frame) and follows(frame, sequence, chain_hash):
                return offset, frame
        return None

    def _read(self, segment: Path, data: SegmentBytes, start: int) -> None:
        self._segment, self._start, self._asked_again_from = segment, start, start
        self._offsets = {}
        for number, (offset, frame) in enumerate(itertools.islice(data.frames(start), _MAX_FRAMES_AHEAD)):
            self._offsets.setdefault(frame.first_sequence, []).append(offset)
            if number == _MAX_FRAMES_AHEAD // 2:
                self._asked_again_from = offset
        if sum(map(len, self._offsets.values())) < _MAX_FRAMES_AHEAD:
            self._asked_again_from = data.num_bytes


@attrs.define(eq=False)
class Misplaced:
    """What was put aside while a log is read, and what was read ahead of its place."""

    strays: list[Stray] = attrs.field(factory=list)
    _taken: set[tuple[Path, int]] = attrs.field(factory=set)
    """Where frames stand that were read before their place was come to."""
    _ahead: FramesAhead = attrs.field(factory=FramesAhead)
    _in_later_segments: dict[Path, FramesAhead] = attrs.field(factory=dict)

    def was_taken(self, segment: Path, offset: int) -> bool:
        """Whether the frame there was read before."""
        return (segment, offset) in self._taken

    def is_still_to_come(self, segment: Path, data: SegmentBytes, start: int, sequence: int, chain_hash: bytes) -> bool:
        """Whether the frame that follows stands further ahead in this segment."""
        return self._ahead.find(segment, data, start, sequence, chain_hash) is not None

    def take_stray(self, sequence: int, chain_hash: bytes | None) -> tuple[Stray, Frame] | None:
        """Return the frame that follows, if it was put aside; it is so no more."""
        for stray in self.strays:
            frame = stray.load() if stray.first_sequence == sequence else None
            if frame is not None and follows(frame, sequence, chain_hash):
                self.strays.remove(stray)
                return stray, frame
        return None

    def take_from(
        self, segments: Iterable[Path], sequence: int, chain_hash: bytes | None
    ) -> tuple[Stray, Frame] | None:
        """Return the frame that follows, if it stands in one of `segments`, which come later; it is passed there."""
        for segment in segments:
            ahead = self._in_later_segments.setdefault(segment, FramesAhead())
            try:
                with SegmentBytes(segment) as data:
                    found = ahead.find(segment, data, 0, sequence, chain_hash)
            except FileNotFoundError:
                continue
            if found is not None:
                self._taken.add((segment, found[0]))
                return Stray.of(found[1], segment, found[0]), found[1]
        return None

    def let_go(self, next_sequence: int) -> list[Stray]:
        """Return what was put aside and whose place is passed; it is put aside no more."""
        passed = [stray for stray in self.strays if stray.first_sequence < next_sequence]
        self.strays = [stray for stray in self.strays if stray.first_sequence >= next_sequence]
        return passed

    def is_copy(self, stray: Stray, holder: Path | None) -> bool:
        """Whether the same frame stands at another place: in the segment that should hold it, or in its own."""
        likely = [] if holder is None else [holder]
        for segment in dict.fromkeys([*likely, stray.segment, *(path for path, _ in self._taken)]):
            try:
                with SegmentBytes(segment) as data:
                    for offset, frame in data.frames(0):
                        is_same = (frame.first_sequence, frame.chain_hash) == (stray.first_sequence, stray.chain_hash)
                        if is_same and (segment, offset) != (stray.segment, stray.offset):
                            return True
            except FileNotFoundError:
                continue
        return False
