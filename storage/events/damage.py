"""What can be wrong with a stored log, by name. One `Damage` is one place."""

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
    "corrupt_frame": "bytes that are no frame; intact ones or another segment stand behind them, or all of its bytes "
    "are there and differ",
    "corrupt_block": "a block of a compressed segment is damaged, or does not expand to the bytes that it states; its "
    "frames are lost, and those in other blocks are read",
    "sequence_gap": "frames are missing within a segment, and no byte is damaged",
    "chain_broken": "a frame or header is intact and does not follow from what stands before it: one of the two was "
    "not written there by the writer of this log; frames that what stands behind them contradicts are left out",
    "corrupt_header": "a segment's header is damaged: one copy, and the other one is read; or both, and the frames "
    "behind them are found again",
    "cut_segment": "frames are missing at the end of a segment, which is not the last one, and no byte is damaged",
    "missing_segment": "no segment holds these sequences, and no record says that they were retired",
    "misplaced_segment": "a segment of another log, or under another name than its header says; it is left out",
}
"""Each kind and its meaning."""


@attrs.frozen
class Damage:
    """One place where the log is not what was written.

    `kind` is one of `DAMAGE_KINDS`; who decodes frames adds others. `sequence` is the first sequence number concerned,
    None where that cannot be known; `num_bytes` counts the bytes from `offset` that could not be used (0 where all
    could be, as in ``chain_broken``).
    """

    kind: str
    segment: str
    offset: int
    sequence: int | None
    detail: str
    num_bytes: int

    @property
    def place(self) -> str:
        """What is damaged, and where."""
        at = "" if self.sequence is None else f", event {self.sequence}"
        return f"{self.kind} in {self.segment} at byte {self.offset}{at}"

    def __str__(self) -> str:
        return f"{self.place}: {self.detail}"


def sequences(first: int, end: int) -> str:
    """Sequence numbers in words; `end` is the first behind them."""
    return f"sequence {first}" if end == first + 1 else f"sequences {first} to {end - 1}"
