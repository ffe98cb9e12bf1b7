"""What the accounts remember of a log so far, apart from how they go on: so it can be kept and taken up again."""

from __future__ import annotations

import attrs

from kvledger.adapters.reasons.chunk_history import ChunkHistory
from kvledger.adapters.reasons.life import Life
from kvledger.adapters.reasons.lives import Lives
from kvledger.adapters.reasons.story import Admission, Story
from kvledger.adapters.reasons.sums import Sums


@attrs.frozen
class Load:
    """A load in flight."""

    life: Life
    admission: Admission | None
    first_token: int
    num_tokens: int


@attrs.define
class Memory:
    """One object, because its parts point at one another."""

    lives: Lives
    history: ChunkHistory = attrs.field(factory=ChunkHistory)
    ended: Sums = attrs.field(factory=Sums)
    """Of all lives that are over."""
    loads: dict[int, Load] = attrs.field(factory=dict)
    """By job id."""
    preempted: list[Story] = attrs.field(factory=list)
    """Of requests that were preempted since the last step."""
    is_blind: bool = False
    """Events are missing, so that silence about a chunk says nothing."""
