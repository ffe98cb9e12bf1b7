"""Which files are segments of this log, and in which order: as their headers say, whatever their names.

Headers are read once. A segment whose header cannot be read stands where its name says.
"""

from __future__ import annotations

import bisect
from collections import Counter
from typing import TYPE_CHECKING

import attrs

from kvledger.storage.events.errors import LogDamaged
from kvledger.storage.events.segment_file import SegmentHeader, first_sequence_of, read_header, segment_paths

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["OrderedSegment", "SegmentOrder"]


@attrs.frozen
class OrderedSegment:
    """A segment and the first sequence number by which it is ordered; None: neither header nor name tells."""

    first_sequence: int | None
    path: Path
    is_renamed: bool = False

    @property
    def place(self) -> tuple[int, bool, str]:
        """Where it stands: of two that begin alike, the one that is named so comes first."""
        return (self.first_sequence or 0, self.is_renamed, self.path.name)


@attrs.define(eq=False)
class SegmentOrder:
    """The segments of a log's directory, or one segment file alone. Reads headers; raises `LogTooNew` and `OSError`."""

    path: Path
    _headers: dict[str, SegmentHeader | None] = attrs.field(factory=dict)
    """By file name; None while no copy of a header is intact, which it may become on a log that is being written."""
    _log_id: str | None = None
    _listed: list[OrderedSegment] = attrs.field(factory=list)

    @property
    def is_directory(self) -> bool:
        """Whether there may be several."""
        return self.path.is_dir()

    def log_id(self) -> str | None:
        """The id in most headers, and of two that are as frequent the one in the earlier header; None without any."""
        if self._log_id is None:
            counted = Counter(header.log_id for header in self._headers.values() if header is not None)
            self._log_id = counted.most_common(1)[0][0] if counted else None
        return self._log_id

    def header(self) -> SegmentHeader | None:
        """The first intact header of the log."""
        return next((header for each in self._listed if (header := self.header_of(each.path)) is not None), None)

    def header_of(self, segment: Path) -> SegmentHeader | None:
        """The header of one segment, where it is intact."""
        return self._headers.get(segment.name)

    def refresh(self) -> list[OrderedSegment]:
        """List the segments of this log anew, in order."""
        paths = segment_paths(self.path) if self.is_directory else [self.path]
        paths = [path for path in paths if self._read_header(path)]
        log_id, self._listed = self.log_id(), []
        for path in paths:
            header, named = self._headers[path.name], first_sequence_of(path)
            if header is None:
                self._listed.append(OrderedSegment(named, path))
            elif header.log_id == log_id:
                first_sequence = header.first_sequence
                self._listed.append(OrderedSegment(first_sequence, path, named not in {None, first_sequence}))
        self._listed.sort(key=lambda segment: segment.place)
        return self._listed

    def beginning_at(self, sequence: int) -> OrderedSegment | None:
        """The last segment that begins at or before `sequence`, else the first one there is now."""
        listed = self.refresh()
        return self.holder_of(sequence) or (listed[0] if listed else None)

    def holder_of(self, sequence: int) -> OrderedSegment | None:
        """The segment in which `sequence` should stand; of several copies the first."""
        holder = None
        for segment in self._listed:
            begins = segment.first_sequence or 0
            if begins <= sequence and (holder is None or begins > (holder.first_sequence or 0)):
                holder = segment
        return holder

    def successor(self, segment: OrderedSegment) -> OrderedSegment | None:
        """The next one; where none is known, the directory is listed anew."""
        for listed in (self._listed, None):
            known = self.refresh() if listed is None else listed
            following = bisect.bisect_right(known, segment.place, key=lambda each: each.place)
            if following < len(known):
                return known[following]
        return None

    def foreign(self) -> list[tuple[Path, SegmentHeader, int]]:
        """Segments of other logs that lie there, with their headers and sizes in bytes."""
        others = [(name, header) for name, header in self._headers.items() if header is not None]
        found = [(self.path / name, header) for name, header in others if header.log_id != self.log_id()]
        return [(path, header, path.stat().st_size) for path, header in found if path.exists()]

    def _read_header(self, segment: Path) -> bool:
        """Read a header that is not known yet; return whether the file is there."""
        if self._headers.get(segment.name) is None:
            try:
                self._headers[segment.name] = read_header(segment, any_copy=True)
            except LogDamaged:
                self._headers[segment.name] = None
            except FileNotFoundError:
                if not self.is_directory:
                    raise
                return False  # retired since the directory was listed
        return True
