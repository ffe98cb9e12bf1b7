"""The kinds of damage in a stored log. A `Damage` describes one damaged place."""

from __future__ import annotations

from typing import Final, Literal

import attrs

__all__ = ["DAMAGE_KINDS", "Damage", "DamageKind", "sequences"]

DamageKind = Literal[
    "torn_tail",
    "corrupt_frame",
    "corrupt_block",
    "sequence_gap",
    "chain_broken",
    "corrupt_header",
    "cut_segment",
    "missing_segment",
    "misplaced_segment",
]

DAMAGE_KINDS: Final[dict[DamageKind, str]] = {
    "torn_tail": "from here to the end of the log, no frame is intact",
    "corrupt_frame": "bytes that are not a frame, followed by intact frames or another segment; or a last frame that "
    "has its full size but wrong bytes",
    "corrupt_block": "a block of a compressed segment is damaged or does not expand to the size that it states; the "
    "frames in this block are lost, the frames in other blocks are read",
    "sequence_gap": "frames are missing within a segment, but no byte is damaged",
    "chain_broken": "an intact frame or header does not continue the frame before it, so this log's writer did not "
    "write both of them in these places; a frame that a later frame contradicts is left out",
    "corrupt_header": "a segment's header is damaged; if one of its two copies is intact, the reader uses this copy; "
    "if not, the reader searches for frames after the header",
    "cut_segment": "frames are missing at the end of a segment that is not the last one, but no byte is damaged",
    "missing_segment": "no segment has these sequence numbers, and no record says that they were retired",
    "misplaced_segment": "a segment of another log, or a segment whose file name does not match its header; the "
    "reader leaves it out",
}
"""Kind → its meaning."""


@attrs.frozen
class Damage:
    """One place where the bytes of a log are not the bytes that were written.

    `kind` is one of `DAMAGE_KINDS`, or a kind that is added when frames are decoded. `sequence` is the first sequence
    number that is affected; None: unknown. `num_bytes` is the number of bytes from `offset` on that the reader does not
    use. It is 0 if the reader uses every byte, for example in ``sequence_gap``.
    """

    kind: str
    segment: str
    offset: int
    sequence: int | None
    detail: str
    num_bytes: int

    @property
    def place(self) -> str:
        """The damage's kind, segment, offset and first event."""
        at = "" if self.sequence is None else f", event {self.sequence}"
        return f"{self.kind} in {self.segment} at byte {self.offset}{at}"

    def __str__(self) -> str:
        return f"{self.place}: {self.detail}"


def sequences(first: int, end: int) -> str:
    """Return a text that names the sequence numbers `first` to `end - 1`."""
    return f"sequence {first}" if end == first + 1 else f"sequences {first} to {end - 1}"
