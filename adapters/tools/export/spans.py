"""What a trace of a log is made of: spans (requests, their states, copies), instants, lookups, steps, counts.

Times are nanoseconds since the log was opened and never run backwards. Nothing here knows a file format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs
import msgspec

from kvledger.adapters.tools.logs.requests import RequestSummary
from kvledger.lifecycle.events import LookupAnswered, LookupDeferred


class Span(msgspec.Struct, eq=False, kw_only=True):
    """Something that lasts. It is filled in until it ends."""

    request_id: str
    sequence: int
    """Of the event that began it."""
    since_ns: int
    until_ns: int | None = None
    """None while it lasts, and where the log ends before it does."""
    last_ns: int = 0
    """The end, or how far the log reaches."""

    @property
    def duration_ns(self) -> int:
        """As far as the log reaches; known at the end."""
        return self.last_ns - self.since_ns


class LifeSpan(Span, eq=False, kw_only=True):
    """One life of a request id, from an arrival to its release. `ordinal` is unique in the log."""

    ordinal: int
    summary: RequestSummary
    """Complete at the end."""
    first_running_ns: int | None = None
    """When every token of the prompt was computed or in flight for the first time."""
    trace_parent: bytes = b""
    """Of its arrival; empty also where that is not in the log."""
    num_tokens_retained: int = 0
    """On its ways back from preemptions, like those recovered."""
    num_tokens_recovered: int = 0
    num_bytes_loaded: int = 0
    num_bytes_saved: int = 0
    state_ns: dict[str, int] = {}
    """State → how long it was in it."""


class StateSpan(Span, eq=False, kw_only=True):
    """A request in one state and generation."""

    ordinal: int
    state: str
    generation: int
    cause: str
    """Id of the event that led here."""
    num_computed_tokens: int
    num_tokens: int
    num_computed_tokens_at_end: int = 0
    left_by: str = ""
    """Id of the event that ended it."""


class CopySpan(Span, eq=False, kw_only=True):
    """One transfer job, from the decision to its settlement. `kind` is `load`, `save` or `tail save`."""

    ordinal: int | None
    """Of the life; None where the log lacks the request's arrival."""
    trace_parent: bytes
    """Of the life."""
    kind: str
    job_id: int
    generation: int
    num_pages: int
    slots: tuple[int, ...]
    block_ids: tuple[int, ...]
    first_token: int | None
    num_tokens: int | None
    chunks: tuple[int, ...]
    is_async: bool
    """Whether steps go on meanwhile."""
    before_forward: bool
    """Whether it must be done before the step's forward, because its blocks are free already."""
    outcome: str = "open"
    """`completed`, `failed`, `given up` (a rank never reported), or `open`."""
    error: str = ""
    ranks_done: list[int] = []
    ranks_failed: list[int] = []
    num_bytes: int = 0
    worker_ns: int = 0
    """Time that the workers measured, added up over their reports."""


class CallSpan(Span, eq=False, kw_only=True):
    """Something that an extension's figures say took time: a hook of a recorded connector. Shown when it is over."""

    extension: str
    name: str


@attrs.frozen
class Lookup:
    """What the scheduler asked and was answered."""

    sequence: int
    """Of the answer."""
    time_ns: int
    ordinal: int | None
    """None where the log lacks the request's arrival."""
    answer: LookupAnswered | LookupDeferred
    is_repeated: bool
    """Whether question and answer are those of the request's lookup before: who waits is asked about at every step."""


@attrs.frozen(kw_only=True)
class Instant:
    """Something that happened at once. `kind` is the event's id, or `events.lost`."""

    kind: str
    sequence: int
    time_ns: int
    request_id: str
    ordinal: int | None
    """None where it is of no request, or the log lacks the request's arrival."""
    text: str
    """In plain words."""
    is_trouble: bool
    """Whether something went wrong here."""
    fields: Mapping[str, object]


@attrs.frozen
class Gauges:
    """What can be counted at one instant."""

    num_requests: Mapping[str, int]
    """State -> requests."""
    num_blocks_held: int
    """Distinct blocks in the block tables of requests. How many there are in all, the log does not say."""
    num_slots_free: int
    num_slots_used: int
    """Slots of the host pool that hold a chunk or a tail, or that a copy reads or writes."""
    num_bytes_used: int | None
    """The same in bytes, by what a page took in the last complete copy; None before there was one."""
    num_chunks_cached: int
    """Chunks that can be loaded."""
    num_loads_in_flight: int
    num_saves_in_flight: int


@attrs.frozen
class Step:
    """One engine step, and what could be counted when everything was decided about it."""

    step: int
    sequence: int
    time_ns: int
    num_scheduled_tokens: int
    num_events: int
    """The step's record and the decisions on it."""
    gauges: Gauges


class Sink:
    """Is shown a trace in the order of the log. Everything is ignored until a subclass wants it.

    The trace does not compute what a sink ignores.
    """

    needs_memory_gauges: ClassVar[bool] = True
    """Whether `Gauges` counts blocks, slots and chunks, which takes a sixth of the time; otherwise they are 0."""
    needs_recoveries: ClassVar[bool] = True
    """Whether tokens recovered and retained are counted for each life; otherwise they are 0."""

    def began(self, span: Span) -> None:
        """A request arrived, entered a state (or another generation of it), a copy was issued, a call was made."""

    def ended(self, span: Span) -> None:
        """It is over, or the log ends; of a request its states before itself."""

    def happened(self, instant: Instant) -> None:
        """Something happened at once."""

    def looked_up(self, lookup: Lookup) -> None:
        """A lookup was answered."""

    def stepped(self, step: Step) -> None:
        """A step and the decisions on it are complete."""

    def counted(self, time_ns: int, gauges: Gauges) -> None:
        """An observation and the decisions on it are complete."""

    def idle(self, time_ns: int) -> None:
        """No request is left that could be scheduled."""
