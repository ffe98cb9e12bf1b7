"""The current event, and the state of its request before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from kvledger.lifecycle.events import Event, RequestFinished, RequestPreempted
from kvledger.lifecycle.states import BlocksRegion, RequestState

if TYPE_CHECKING:
    from kvledger.lifecycle.reader.records import Life


Visit = Callable[[Any], None]
"""Called with an event that the model contains already."""
Visits = Iterable[tuple[type[msgspec.Struct], Visit]]
"""(event class, check). A rule of an extension may name the payload class of its event instead."""


@attrs.define
class Moment:
    """One object that changes with each event: copy what you keep.

    At an event that names no request, the fields about a request are meaningless.
    """

    sequence: int = 0
    event: Event | None = None
    time_ns: int = 0
    """Time of the event, or of the last event that has one."""
    cause: int = 0
    """Sequence number of the last observation, which is the cause of any decision now; 0 before the first."""
    life: Life | None = None
    """The present life of the event's request, even if it begins or ends with this event."""
    earlier: Life | None = None
    """At an arrival, the life that had the id before."""
    state_before: RequestState | None = None
    """State of the request before the event; None if no request had the id."""
    blocks_before: BlocksRegion | None = None
    was_stale: bool = False
    """At a preemption or an end, whether the request's KV was from before a reset."""
    num_steps_decoded: int = 0
    """At a preemption or an end, number of steps in a row in which the request decoded one token."""
    num_computed_tokens: int = 0
    """Tokens that the event's request had computed or in flight before the event."""
    path_before: str = ""
    """State and sub-state before the event; empty if no request had the id, or its state was not known."""
    is_legal: bool = True
    """Whether the tables have a row for the event in phase and blocks; False if no request had the id."""
    is_refused: bool = False
    """Whether states refuse this observation, so that only part of it is folded. False if events of the request are
    missing."""
    refused_rows: list[tuple[Life, RequestState, BlocksRegion]] = attrs.field(factory=list)
    """At a step: (life, its phase and blocks before the step), if the step schedules it although these refuse that."""
    moved_rows: list[tuple[Life, int, int]] = attrs.field(factory=list)
    """At a step: (life, tokens counted up to the step, computed tokens in its row), if the row has more."""
    unknown_rows: list[int] = attrs.field(factory=list)
    """At a step: ordinals of rows that are about no life, or pause one that does not decode one token per step."""


class StoredMoment(msgspec.Struct, forbid_unknown_fields=True):
    """What the next event needs of the last one."""

    sequence: int
    cause: int
    time_ns: int


def num_intact_tokens(event: RequestPreempted | RequestFinished) -> int:
    """Return the settled tokens that a copy before the next forward can still read. Uses no code of `projections/`."""
    return 0 if event.blocks_zeroed else event.num_settled_tokens
