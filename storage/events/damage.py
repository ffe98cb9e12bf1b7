"""The kinds of damage in a stored log. One `Damage` is one place."""

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
    "torn_tail": "nothing intact from here to the end of the log",
    "corrupt_frame": "bytes that are not a frame, before intact frames or another segment; or a last frame that is "
    "complete but has wrong bytes",
    "corrupt_block": "a block of a compressed segment is damaged or does not expand to the size that it states; its "
    "frames are lost, those in other blocks are read",
    "sequence_gap": "frames are missing within a segment, but no byte is damaged",
    "chain_broken": "an intact frame or header does not follow from the one before it, so the writer of this log did "
    "not write one of the two there; frames that later ones contradict are left out",
    "corrupt_header": "a segment's header is damaged: if one copy is, the other one is read; if both are, the reader "
    "looks for the frames after them",
    "cut_segment": "frames are missing at the end of a segment that is not the last one, but no byte is damaged",
    "missing_segment": "no segment has these sequence numbers, and no record says that they were retired",
    "misplaced_segment": "a segment of another log, or with another name than in its header; it is left out",
}
"""Kind → its meaning."""


@attrs.frozen
class Damage:
    """One place where the log is not what was written.

    `kind` is one of `DAMAGE_KINDS`, or one that a decoder of frames adds. `sequence` is the first sequence number
    affected, None if unknown. `num_bytes` counts the unusable bytes from `offset` on: 0 in ``chain_broken``, for
    example.
    """

    kind: str
    segment: str
    offset: int
    sequence: int | None
    detail: str
    num_bytes: int

    @property
    def place(self) -> str:
        """The damage's kind and place."""
        at = "" if self.sequence is None else f", event {self.sequence}"
        return f"{self.kind} in {self.segment} at byte {self.offset}{at}"

    def __str__(self) -> str:
        return f"{self.place}: {self.detail}"


def sequences(first: int, end: int) -> str:
    """Return the sequence numbers `first` up to before `end` in words."""
    return f"sequence {first}" if end == first + 1 else f"sequences {first} to {end - 1}"
