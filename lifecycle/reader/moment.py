"""The event at hand, and what was known of its request before it."""

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
"""Looks at one event, which the model contains."""
Visits = Iterable[tuple[type[msgspec.Struct], Visit]]
"""(event class, check); a rule of an extension may have the class of what an event of it says in the event's place."""


@attrs.define
class Moment:
    """One object that changes with each event. Copy what is to be kept.

    What is about a request says nothing at an event that names none.
    """

    sequence: int = 0
    event: Event | None = None
    time_ns: int = 0
    """Time of the event; of one that has none, time of the last event that has one."""
    cause: int = 0
    """Sequence number of the last observation: what is decided now is decided upon it. 0 before the first."""
    life: Life | None = None
    """The present life of the event's request, one that begins or ends here included."""
    earlier: Life | None = None
    """Of an arrival: the life that had the request's id before."""
    state_before: RequestState | None = None
    """None where nobody had the request's id."""
    blocks_before: BlocksRegion | None = None
    was_stale: bool = False
    """Of a preemption and an end: whether what the request had computed was from before a reset."""
    num_steps_decoded: int = 0
    """Of a preemption and an end: for how many steps the request had decoded one token in each."""
    num_computed_tokens: int = 0
    """Of an event of a request: tokens that the request had computed or in flight before it."""
    path_before: str = ""
    """The same of its state and sub-state; empty where no request had the id, or its state was not known."""
    is_legal: bool = True
    """Whether the tables have a row for the event in phase and blocks; not if nobody had the request's id."""
    is_refused: bool = False
    """Whether it is an observation that states refuse, so that only part of it is folded. Not known where events are
    missing of the request: then it is False."""
    refused_rows: list[tuple[Life, RequestState, BlocksRegion]] = attrs.field(factory=list)
    """Of a step: whom it schedules where none can be scheduled, and where each was before."""
    moved_rows: list[tuple[Life, int, int]] = attrs.field(factory=list)
    """Of a step: whose row begins with more tokens than the steps before add up to, that sum, and the row's count."""
    rows_of_nobody: list[int] = attrs.field(factory=list)
    """Of a step: the ordinals of rows that concern no life, or that pause one that does not decode as before."""


class StoredMoment(msgspec.Struct, forbid_unknown_fields=True):
    """What of the last event the next one needs."""

    sequence: int
    cause: int
    time_ns: int


def num_intact_tokens(event: RequestPreempted | RequestFinished) -> int:
    """Of the settled tokens those that a copy made before the next forward still finds; not asked of the live path."""
    return 0 if event.blocks_zeroed else event.num_settled_tokens
