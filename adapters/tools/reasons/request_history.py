"""All that is known of one life of a request, as plain values that can be stored.

It names events by their sequence numbers and does not repeat them: whoever shows the history reads them from the log.
"""

from __future__ import annotations

from typing import TypeVar

import attrs

from kvledger.adapters.tools.reasons.spans import Span
from kvledger.adapters.tools.reasons.sums import Sums
from kvledger.lifecycle.reader import Spent

MAX_KEPT = 512
"""Of each kind of entry the first are kept, and the last one; `RequestHistory.num_left_out` counts the others."""

_Entry = TypeVar("_Entry")


@attrs.frozen
class SharedLoad:
    """Another request's load in flight of the same tokens."""

    job_id: int
    request_id: str
    sequence: int
    """Of its `load.issued`."""
    first_token: int = 0
    end_token: int = 0
    """Of the tokens that both requests need."""


@attrs.define
class Lookup:
    """Equal lookups in a row, as one. `spans`: the tokens that the first of them left to compute, and why."""

    first_sequence: int
    last_sequence: int
    """Of the answers, or of the deferrals."""
    spans: tuple[Span, ...]
    num_times: int = 1
    awaited: SharedLoad | None = None
    """The load of the same tokens for which it was deferred."""


@attrs.define
class Admission:
    """Blocks were given to a waiting request: of the tokens it needs, which are there, which are to come, which not."""

    sequence: int
    """Of `blocks.allocated`, or of the step, where the allocation is not in the log."""
    answer_sequence: int
    """Of the lookup's answer; 0: there was none."""
    num_tokens: int
    num_retained: int
    num_claimed: int
    mark: int
    """Tokens below it had been computed before a preemption."""
    spans: tuple[Span, ...] = ()
    """Of the tokens left to compute; a failed load adds its own."""
    missed: tuple[Span, ...] = ()
    """The same as it was when blocks were given."""
    not_loaded: tuple[Span, ...] = ()
    """Claimed tokens that no load brought."""
    num_elsewhere: int = 0
    """There already when the first step began, and not by this connector's doing."""
    is_started: bool = False
    job_id: int = 0
    duplicated: SharedLoad | None = None
    """The load that was bringing most of the same tokens when this one was issued."""
    num_before_reset: int = 0
    """Claimed tokens that were computed before vLLM reset its prefix cache and spared the connector."""
    num_retained_before_reset: int = 0
    """Tokens of vLLM's prefix cache that another request had loaded, and that were computed before such a reset."""
    reset_sequence: int = 0
    """The last such reset; 0 if there is none."""
    num_held: int = 0
    """Blocks that all requests held together, this one included; 0 if that is not known."""


@attrs.frozen
class Recomputation:
    """A step computed tokens again."""

    sequence: int
    spans: tuple[Span, ...]
    after_rollback: bool
    """Computed twice without a preemption in between."""


@attrs.frozen
class Preemption:
    """Its blocks were taken."""

    sequence: int
    """Of `request.preempted`."""
    num_blocks: int
    """That it had, of all groups of layers."""
    is_full: bool
    """Whether they held no token more than it had computed, so that it needed another one itself. False where that is
    not known: events are missing, or a group has a window."""
    num_held: int = 0
    """Blocks that all requests held together, those of this one included; 0 if that is not known."""


@attrs.define
class RequestHistory:
    """One life. `moments` are the sequence numbers of what happened to it, in order."""

    request_id: str
    ordinal: int
    sums: Sums
    spent: Spent | None = None
    """Until it finished, or until the log's end. None: its beginning is not in the log."""
    num_preemptions: int = 0
    has_finished: bool = False
    lookups: list[Lookup] = attrs.field(factory=list)
    admissions: list[Admission] = attrs.field(factory=list)
    recomputations: list[Recomputation] = attrs.field(factory=list)
    moments: list[int] = attrs.field(factory=list)
    preemptions: list[Preemption] = attrs.field(factory=list)
    """The first ones."""
    num_left_out: int = 0

    def keep(self, entries: list[_Entry], entry: _Entry) -> None:
        """Add to one of the lists, which stays bounded."""
        if len(entries) >= MAX_KEPT:
            entries.pop()
            self.num_left_out += 1
        entries.append(entry)
