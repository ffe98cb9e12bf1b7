"""What is known where an audit begins in the middle of a log, as plain data.

Until audits keep a state of their own next to snapshots, `taken_over.py` fills it from live state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import msgspec

if TYPE_CHECKING:
    from kvledger.lifecycle.reader.records import Answer, Copy, IssuedTail, Life, Prefix


@attrs.frozen
class Measured:
    """What tokens cost, as far as it was measured; pairs of tokens and nanoseconds."""

    steps: Sequence[tuple[int, int]]
    """Steps in a row, and when each was scheduled."""
    samples: Sequence[tuple[int, int]]
    loads: Sequence[tuple[int, int]]
    """Since the last conclusion."""
    issued: Mapping[int, tuple[int, bool]]
    """Load that nobody has reported -> its tokens, and whether a step waits for it."""
    declined_until_ns: int | None


@attrs.frozen(kw_only=True)
class Start:
    """Whoever takes something over may keep and change it: nobody else has it."""

    num_steps: int
    time_ns: int
    num_arrived: int
    """Lives so far, which is the ordinal of the next one."""
    lives: Sequence[Life]
    held: Mapping[int, Sequence[int]]
    """Ordinal -> block ids in token order."""
    lost: Mapping[int, Sequence[int]]
    """The same, lost since the last step."""
    leaving: Mapping[str, int]
    """Request id -> tokens that were settled when its windows left pages, since the last step."""
    left: Mapping[str, int]
    """The same right before the last step."""
    jobs: Sequence[Copy]
    given_up: Sequence[Copy]
    last_job_id: int
    epoch: int
    """Resets so far."""
    committed: Mapping[bytes, tuple[int, ...]]
    """Chunk key -> slots."""
    uses: Sequence[Sequence[bytes]]
    """Keys of the prefixes that were used and are not held, from their first chunk on; least recently used first."""
    tails: Mapping[int, IssuedTail]
    """By ordinal."""
    waited_for: Mapping[str, Prefix]
    """Request id -> what it will come back for."""
    answers: Mapping[str, Answer]
    """By request id; those that no allocation has claimed."""
    num_deferred: Mapping[str, int]
    """Request id -> how often in a row it was put off."""
    deferred_for: Mapping[str, int]
    """Request id -> the job for which it was put off last."""
    costs: Measured
    cursors: Mapping[str, int]
    """Request id -> chunks dealt with."""
    has_hook_failed: bool
    of_extensions: Mapping[str, msgspec.Struct]
    """Name of an extension's projection -> its state."""
    stopped_extensions: Mapping[str, int]
    """Extension that takes no part any more -> event that says so."""
