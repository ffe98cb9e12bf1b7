"""The pieces of a log on disk, from any place on, also while the log is written. Never locks, never writes.

It hands out what is whole and follows from what it handed out before: CRC, sequence and chain are checked. What is
wrong is named by the reader (`LogReader`), so a shipper and ``verify`` use the same words. Knows no network.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from kvledger.storage.events.errors import LogDamaged, LogError
from kvledger.storage.events.frames import (
    FRAME_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    Frame,
    next_chain_hash,
    parse_frame,
)
from kvledger.storage.events.nats.errors import LogForked
from kvledger.storage.events.nats.messages import Piece
from kvledger.storage.events.nats.retired import record_between
from kvledger.storage.events.reader import Damage, LogReader
from kvledger.storage.events.segment_file import (
    SegmentHeader,
    first_sequence_of,
    read_header,
    segment_name,
    segment_paths,
)

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LogTail", "num_bytes_behind"]

_CHUNK_BYTES: Final = 1 << 20
_LOG_ID: Final = re.compile(r"[0-9a-f]{32}")
_LENGTH_AT: Final = slice(6, 10)


class LogTail:
    """One log's pieces in order. `read` until it returns nothing; `trouble` says whether that is the end.

    `lost` collects the sequences (first -> last) that were retired before they could be read.
    """

    def __init__(self, directory: Path) -> None:
        """Look at the log in `directory`.

        Raises:
            LogError: it holds no log, or none of its segments has a readable header.

        """
        self.directory: Final = directory
        self.log_id: Final = _log_id(directory)
        self.lost: dict[int, int] = {}
        self.last: Piece | None = None
        """The piece read last, or the one given to `seek`."""
        self._data = b""
        self._data_at = 0

    @property
    def next_sequence(self) -> int:
        """The first sequence number that was not read yet."""
        return 1 if self.last is None else self.last.next_sequence

    def seek(self, last: Piece | None) -> None:
        """Go on behind `last`, which somebody else keeps; None: begin with the first segment there is.

        Raises:
            LogForked: the files have other bytes there, or end before.

        """
        self._forget()
        self.last = last
        if last is None:
            return
        segment = self.directory / last.segment
        try:
            with segment.open("rb") as file:
                file.seek(last.offset)
                stored = file.read(len(last.data))
        except FileNotFoundError:
            return  # Retired by now; what follows is found by `_successor`, and must fit the chain.
        if stored != last.data:
            is_short = last.data.startswith(stored)
            found = (
                f"the file ends {len(last.data) - len(stored)} bytes before that" if is_short else "the file differs"
            )
            raise LogForked(
                f"{segment}: the stream holds {last}, and {found}. The log lost what it had (a power cut with "
                "durability 'os' does that), or was written anew. The stream keeps what it has; begin a new log"
            )

    def read(self, max_pieces: int, max_bytes: int) -> list[Piece]:
        """Return the next whole pieces, as many as fit the bounds but at least one if there is one."""
        pieces: list[Piece] = []
        num_bytes = 0
        while len(pieces) < max_pieces and num_bytes < max_bytes:
            piece = self._next()
            if piece is None:
                break
            self.last = piece
            num_bytes += len(piece.data)
            pieces.append(piece)
        return pieces

    def trouble(self) -> Damage | None:
        """Return what keeps the log from being read further, None if this is simply its end (or it went on by now).

        A ``torn_tail`` may be a frame that is being written: if the file does not change, it is torn. This reads the
        whole last segment, unless the log plainly ends there. Raises `LogError` if the log is gone.
        """
        if self.last is not None and num_bytes_behind(self.directory, self.last) == 0 and self.is_in_place:
            return None
        reader = LogReader(self.directory, from_sequence=self.next_sequence)
        frame = next(iter(reader), None)
        segments = _segments(self.directory)
        for damage in reader.damage:
            is_before = self.last is not None and (damage.segment, damage.offset) < (self.last.segment, self.last.end)
            # The oldest are gone: `read` goes on behind the gap, and has it in `lost`.
            is_retired = damage.kind == "missing_segment" and segments and damage.segment == segments[0].name
            if not is_before and not is_retired:
                return damage
        if self.last is None or not (self.directory / self.last.segment).exists():
            return None
        if not self.is_in_place:
            return self._changed("the file has become shorter than what was read here before")
        if frame is not None and reader.tail is not None and not self._continues(frame, reader.tail[0]):
            return self._changed(f"frame {frame.first_sequence} does not follow from what was read here before")
        return None

    @property
    def is_in_place(self) -> bool:
        """Whether the file still holds what was read, or is gone as a whole."""
        segment = None if self.last is None else self.directory / self.last.segment
        return self.last is None or segment is None or _size(segment) >= self.last.end or not segment.exists()

    def _continues(self, frame: Frame, segment: Path) -> bool:
        """Whether the frame, which is sound where it stands, follows from what was read when it was not there yet."""
        if self.last is None:
            return True
        if frame.first_sequence != self.last.next_sequence:
            return False
        if segment.name == self.last.segment:
            return next_chain_hash(self.last.chain_hash, frame) == frame.chain_hash
        return read_header(segment).previous_head_hash == self.last.chain_hash

    def _changed(self, detail: str) -> Damage | None:
        if self.last is None:
            return None
        return Damage("chain_broken", self.last.segment, self.last.end, self.last.next_sequence, detail, 0)

    def _next(self) -> Piece | None:
        if self.last is not None:
            piece = self._frame()
            if piece is not None:
                return piece
        successor = self._successor()
        if successor is None:
            return None
        if self.last is not None:
            # The successor was there before this second look, so nothing can be added to this segment any more.
            self._forget()
            piece = self._frame()
            if piece is not None:
                return piece
            if _size(self.directory / self.last.segment) > self.last.end:
                return None  # Something stands there that is no frame.
        return self._enter(successor)

    def _frame(self) -> Piece | None:
        """The frame behind the last piece in the same segment, if it is there, whole, and follows."""
        if self.last is None or not self._fill(FRAME_HEADER_BYTES):
            return None
        start = self.last.end - self._data_at
        num_bytes = FRAME_HEADER_BYTES + int.from_bytes(
            self._data[start + _LENGTH_AT.start : start + _LENGTH_AT.stop], "little"
        )
        if num_bytes > FRAME_HEADER_BYTES + MAX_PAYLOAD_BYTES or not self._fill(num_bytes):
            return None
        start = self.last.end - self._data_at
        frame = parse_frame(self._data, start)
        if (
            not isinstance(frame, Frame)
            or frame.first_sequence != self.last.next_sequence
            or next_chain_hash(self.last.chain_hash, frame) != frame.chain_hash
        ):
            self._forget()  # It may have been in the making: it is read anew the next time.
            return None
        data = self._data[start : start + num_bytes]
        return Piece(
            self.last.segment, self.last.end, data, frame.first_sequence, frame.next_sequence, frame.chain_hash
        )

    def _fill(self, num_bytes: int) -> bool:
        """Have `num_bytes` in memory from the end of the last piece on; False if the file does not hold them (yet)."""
        if self.last is None:
            return False
        at = self.last.end
        if self._data_at <= at and at + num_bytes <= self._data_at + len(self._data):
            return True
        segment = self.directory / self.last.segment
        if _size(segment) < at + num_bytes:
            self._forget()
            return False
        try:
            with segment.open("rb") as file:
                file.seek(at)
                self._data, self._data_at = file.read(max(_CHUNK_BYTES, num_bytes)), at
        except FileNotFoundError:
            self._forget()
        return len(self._data) >= num_bytes

    def _forget(self) -> None:
        self._data, self._data_at = b"", 0

    def _successor(self) -> Path | None:
        """The segment to go on in. Usually one look: in a whole log its name is known."""
        if self.last is not None:
            expected = self.directory / segment_name(self.last.next_sequence)
            if expected.name != self.last.segment and expected.exists():
                return expected
            if (self.directory / self.last.segment).exists():
                return None  # Segments are missing further on, if there are any: for `trouble` to say.
        segments = _segments(self.directory)
        if not segments or (self.last is not None and segments[0].name <= self.last.segment):
            return None
        return segments[0]

    def _enter(self, segment: Path) -> Piece | None:
        """The header block of the segment, if it can be what follows."""
        try:
            header = read_header(segment)
            with segment.open("rb") as file:
                block = file.read(header.num_bytes)
        except (LogDamaged, FileNotFoundError):
            return None
        first = header.first_sequence
        if header.log_id != self.log_id or first != first_sequence_of(segment) or not self._fits(header):
            return None
        retired = None
        if first > self.next_sequence:
            self.lost[self.next_sequence] = first - 1
            retired = record_between(self.directory, self.log_id, self.next_sequence, first - 1)
        return Piece(segment.name, 0, block, first, first, header.chain_hash, retired or "")

    def _fits(self, header: SegmentHeader) -> bool:
        """Whether the segment follows. A jump forward is none: the segments before it are gone from the front."""
        if self.last is None:
            return True
        if header.first_sequence == self.last.next_sequence:
            return header.previous_head_hash == self.last.chain_hash
        return header.first_sequence > self.last.next_sequence


def num_bytes_behind(directory: Path, last: Piece | None) -> int:
    """Return how many bytes the log's segments hold behind `last` (None: in all)."""
    total = 0
    for segment in _segments(directory):
        if last is None or segment.name > last.segment:
            total += _size(segment)
        elif segment.name == last.segment:
            total += max(0, _size(segment) - last.end)
    return total


def _log_id(directory: Path) -> str:
    reason = "it holds no log segment (*.kvlog)"
    for segment in _segments(directory):
        try:
            log_id = read_header(segment).log_id
            if not _LOG_ID.fullmatch(log_id):
                raise LogError(f"{segment}: {log_id!r} is no log id: 32 hex digits")
            return log_id
        except (LogDamaged, FileNotFoundError) as error:
            reason = f"no segment has a readable header: {error}"
    raise LogError(f"{directory}: {reason}")


def _segments(directory: Path) -> list[Path]:
    try:
        return segment_paths(directory)
    except FileNotFoundError:
        return []


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - half the cost, and this is asked often
    except FileNotFoundError:
        return 0
