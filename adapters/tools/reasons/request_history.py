"""All that is known of one life of a request, as plain values that can be stored.

A history names events by their sequence numbers. To show a history, read these events from the log.
"""

from __future__ import annotations

from typing import TypeVar

import attrs

from kvledger.adapters.tools.reasons.spans import Span
from kvledger.adapters.tools.reasons.sums import Sums
from kvledger.lifecycle.reader import Spent

MAX_KEPT = 512
"""Entries of each kind to keep: the first ones and the last one. `RequestHistory.num_left_out` counts the others."""

_Entry = TypeVar("_Entry")


@attrs.frozen
class SharedLoad:
    """A load in flight of another request, for tokens that this request needs, too."""

    job_id: int
    request_id: str
    sequence: int
    """Sequence number of the load's `load.issued`."""
    first_token: int = 0
    end_token: int = 0
    """Both requests need the tokens from `first_token` to before `end_token`."""


@attrs.define
class Lookup:
    """Consecutive equal lookups, as one entry. `spans`: tokens that the first lookup left to compute, with reasons."""

    first_sequence: int
    last_sequence: int
    """`first_sequence` and `last_sequence` are the sequence numbers of the first and the last answer or deferral."""
    spans: tuple[Span, ...]
    num_times: int = 1
    awaited: SharedLoad | None = None
    """The load because of which the lookup was deferred; None: there is none, or it has no token of this lookup."""
    num_held: int = 0
    """Blocks that all requests held at the first lookup; 0 if unknown."""


@attrs.define
class Admission:
    """An admission: which of the request's tokens vLLM has, which will be loaded, and which must be computed."""

    sequence: int
    """Sequence number of `blocks.allocated`, or of the step if the log has no allocation."""
    answer_sequence: int
    """Sequence number of the answer to the lookup; 0: there was no lookup."""
    num_tokens: int
    num_retained: int
    num_claimed: int
    mark: int
    """Number of tokens that had been computed before a preemption."""
    spans: tuple[Span, ...] = ()
    """Tokens that the request must compute after this admission. Tokens whose load fails later, and tokens that are
    rolled back later, are added to these spans."""
    missed: tuple[Span, ...] = ()
    """Tokens that were left to compute when the request got blocks."""
    not_loaded: tuple[Span, ...] = ()
    """Claimed tokens that were not loaded."""
    num_elsewhere: int = 0
    """Tokens that had KV when the first step began. The KV came from neither vLLM's prefix cache nor this connector."""
    is_started: bool = False
    job_id: int = 0
    duplicated: SharedLoad | None = None
    """The load that was in flight when this admission's load was issued, and had the most tokens in common with it."""
    num_before_reset: int = 0
    """Claimed tokens that were computed before a reset of only vLLM's own prefix cache."""
    num_retained_before_reset: int = 0
    """Tokens in vLLM's prefix cache that were computed before a reset of this cache. A load brought them back later."""
    reset_sequence: int = 0
    """Sequence number of the last reset to which `num_before_reset` and `num_retained_before_reset` refer; 0: none."""
    num_held: int = 0
    """Blocks that all requests held, including the admitted one; 0 if unknown."""


@attrs.frozen
class Recomputation:
    """A step that computed tokens again."""

    sequence: int
    spans: tuple[Span, ...]
    after_rollback: bool
    """Whether a rollback, and no preemption, is why the tokens were computed again."""


@attrs.frozen
class Preemption:
    """A preemption of the request."""

    sequence: int
    """Sequence number of `request.preempted`."""
    num_blocks: int
    """Blocks that the request had, of all groups of layers."""
    is_full: bool
    """Whether the request's computed tokens filled all of its blocks, so that it needed another block itself. False if
    unknown: events are missing, or a group has a window."""
    num_held: int = 0
    """Blocks that all requests held, including this request's; 0 if unknown."""


@attrs.define
class RequestHistory:
    """The history of one life. `moments`: sequence numbers of the request's main events, in order."""

    request_id: str
    ordinal: int
    sums: Sums
    spent: Spent | None = None
    """Time until the request finished, or until the end of the log. None: the life's beginning is not in the log."""
    num_preemptions: int = 0
    has_finished: bool = False
    lookups: list[Lookup] = attrs.field(factory=list)
    admissions: list[Admission] = attrs.field(factory=list)
    recomputations: list[Recomputation] = attrs.field(factory=list)
    moments: list[int] = attrs.field(factory=list)
    preemptions: list[Preemption] = attrs.field(factory=list)
    """The first `MAX_KEPT` preemptions."""
    num_left_out: int = 0

    def keep(self, entries: list[_Entry], entry: _Entry) -> None:
        """Append an entry to one of the lists. In a full list, the new entry replaces the last one."""
        if len(entries) >= MAX_KEPT:
            entries.pop()
            self.num_left_out += 1
        entries.append(entry)
