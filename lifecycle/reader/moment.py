"""The current event, and the state of its request before the event."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from kvledger.lifecycle import ranges
from kvledger.lifecycle.events import Event, RequestFinished, RequestPreempted
from kvledger.lifecycle.states import BlocksRegion, RequestState

if TYPE_CHECKING:
    from kvledger.lifecycle.reader.records import Life


Visit = Callable[[Any], None]
"""Called with an event that the model has folded already."""
Visits = Iterable[tuple[type[msgspec.Struct], Visit]]
"""(event class, check). A rule of an extension may name the payload class of its event instead."""


@attrs.define
class Moment:
    """The current event. This one object changes with each event, so copy the values that you keep.

    At an event that names no request, the fields about a request are meaningless.
    """

    sequence: int = 0
    event: Event | None = None
    time_ns: int = 0
    """Time of the event, or of the last event that has a time."""
    cause: int = 0
    """Sequence number of the last observation, which is the cause of any decision now; 0 before any observation."""
    life: Life | None = None
    """The present life of the event's request, even if it begins or ends with this event."""
    earlier: Life | None = None
    """At an arrival: the life that had the request id before, or None."""
    state_before: RequestState | None = None
    """State of the request before the event; None if no request had the id."""
    blocks_before: BlocksRegion | None = None
    was_stale: bool = False
    """When a request is preempted or ends: whether its KV was from before a reset."""
    num_steps_decoded: int = 0
    """When a request is preempted or ends: number of steps in a row in which it decoded one token."""
    num_computed_tokens: int = 0
    """Number of tokens that were computed or in flight for the event's request before the event."""
    path_before: str = ""
    """State and sub-state before the event; empty if no request had the id, or its state was not known."""
    is_legal: bool = True
    """Whether the transition tables of `phase` and `blocks` allow the event; False if no request had the id."""
    is_refused: bool = False
    """Whether the request's states refuse this observation, so that only part of it is folded. False if events of the
    request may be missing."""
    refused_rows: list[tuple[Life, RequestState, BlocksRegion]] = attrs.field(factory=list)
    """At a step: (life, phase, blocks) of each life that the step schedules although phase and blocks refuse that."""
    moved_rows: list[tuple[Life, int, int]] = attrs.field(factory=list)
    """At a step: (life, tokens that the reader counted, computed tokens in the life's row), if the row has more."""
    unknown_rows: list[int] = attrs.field(factory=list)
    """At a step: ordinals of scheduled or paused lives that do not exist, and of paused lives that are not steady."""


class StoredMoment(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of `Moment` that are needed at the next event."""

    sequence: ranges.Sequence
    cause: ranges.Sequence
    time_ns: ranges.TimeNs


def num_intact_tokens(event: RequestPreempted | RequestFinished) -> int:
    """Return how many settled tokens a copy before the next forward pass can read. Uses no code of `projections/`."""
    return 0 if event.blocks_zeroed else event.num_settled_tokens
