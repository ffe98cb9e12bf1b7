"""Parts of a trace of a log: spans (requests, their states, copies), instants, lookups, steps, counts.

Times are nanoseconds since the log was opened and never decrease. This module must not depend on file formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs
import msgspec

from kvledger.adapters.tools.logs.requests import RequestSummary
from kvledger.lifecycle.events import LookupAnswered, LookupDeferred


class Span(msgspec.Struct, eq=False, kw_only=True):
    """A period of time. The fields of a span are complete when it ends."""

    request_id: str
    sequence: int
    """Sequence number of the event that began the span."""
    since_ns: int
    until_ns: int | None = None
    """End of the span; None if the span has not ended in the log."""
    last_ns: int = 0
    """End of the span; if the span is open at the end of the log, the log's last time."""

    @property
    def duration_ns(self) -> int:
        """Duration in nanoseconds. It is known after the span has ended, or after the log was read to its end."""
        return self.last_ns - self.since_ns


class LifeSpan(Span, eq=False, kw_only=True):
    """One life of a request id, from the arrival to the release. `ordinal` is unique in the log."""

    ordinal: int
    summary: RequestSummary
    """Summary of the life; complete when the span ends."""
    first_running_ns: int | None = None
    """When the request first was in the state `running`: all prompt tokens are computed, or in a step in flight."""
    trace_parent: bytes = b""
    """Trace context of the arrival; empty if the arrival has none or is not in the log."""
    num_tokens_retained: int = 0
    """Tokens that vLLM's prefix cache still had after preemptions."""
    num_tokens_recovered: int = 0
    """Tokens that were loaded after preemptions."""
    num_bytes_loaded: int = 0
    num_bytes_saved: int = 0
    state_ns: dict[str, int] = {}
    """State → nanoseconds in that state."""


class StateSpan(Span, eq=False, kw_only=True):
    """A request in one state and generation."""

    ordinal: int
    state: str
    generation: int
    cause: str
    """Id of the event that began the state."""
    num_computed_tokens: int
    num_tokens: int
    num_computed_tokens_at_end: int = 0
    left_by: str = ""
    """Id of the event that ended the state."""


class CopySpan(Span, eq=False, kw_only=True):
    """One copy, from the decision that issued it to its end. `kind` is `load`, `save` or `tail save`."""

    ordinal: int | None
    """Ordinal of the life; None if the log lacks the request's arrival."""
    trace_parent: bytes
    """Trace context of the life."""
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
    """Whether steps run during the copy."""
    before_forward: bool
    """Whether the copy must complete before the step's forward pass, because its blocks are free already."""
    outcome: str = "open"
    """`completed`, `failed`, `given up` (a rank never reported), or `open`."""
    error: str = ""
    ranks_done: list[int] = []
    ranks_failed: list[int] = []
    num_bytes: int = 0
    worker_ns: int = 0
    """Sum of the times that workers measured, in nanoseconds. See `shares_of`."""


class CallSpan(Span, eq=False, kw_only=True):
    """A duration in an extension's figures, such as the duration of a hook of a recorded connector.

    Its beginning and its end are passed to the sink at the same time.
    """

    extension: str
    name: str


@attrs.frozen
class Lookup:
    """A lookup by the scheduler, with its answer."""

    sequence: int
    """Sequence number of the answer."""
    time_ns: int
    ordinal: int | None
    """Ordinal of the life; None if the log lacks the request's arrival."""
    answer: LookupAnswered | LookupDeferred
    is_repeated: bool
    """Whether the answer equals the life's previous answer, or is another deferral because of the same job."""


@attrs.frozen(kw_only=True)
class Instant:
    """An event without duration. `kind` is the event's id, or `events.lost`."""

    kind: str
    sequence: int
    time_ns: int
    request_id: str
    ordinal: int | None
    """Ordinal of the life; None without a request, or if the log lacks the request's arrival."""
    text: str
    """The event in words."""
    is_trouble: bool
    """Whether the event is a failure."""
    fields: Mapping[str, object]


@attrs.frozen
class Gauges:
    """Counts at one moment."""

    num_requests: Mapping[str, int]
    """State → number of requests."""
    num_blocks_held: int
    """Distinct blocks in the block tables of requests."""
    num_slots_free: int
    num_slots_used: int
    """Slots of the host pool that contain a chunk or a tail, or that a copy reads or writes."""
    num_bytes_used: int | None
    """Used slots in bytes, computed with the page size of the last completed save; None before the first save."""
    num_chunks_cached: int
    """Chunks that can be loaded."""
    num_loads_in_flight: int
    num_saves_in_flight: int


@attrs.frozen
class Step:
    """One engine step, with the counts after all decisions that it caused."""

    step: int
    sequence: int
    time_ns: int
    num_scheduled_tokens: int
    num_events: int
    """Number of events in the log: the step and the decisions that it caused."""
    gauges: Gauges


class Sink:
    """Receives a trace in the order of the log. Each method does nothing unless a subclass overrides it.

    The trace does not compute values for methods that are not overridden.
    """

    needs_memory_gauges: ClassVar[bool] = True
    """Whether `Gauges` counts blocks, slots and chunks. If not, these counts are 0, which saves a sixth of
    the time for a trace."""
    needs_recoveries: ClassVar[bool] = True
    """Whether recovered and retained tokens are counted for each life; otherwise these counts are 0."""

    def began(self, span: Span) -> None:
        """Called when a request arrives or enters a state or generation, a copy is issued, or a call is made."""

    def ended(self, span: Span) -> None:
        """Called with each span when it ends, or at the end of the log. A request's states end before its own span."""

    def happened(self, instant: Instant) -> None:
        """Called with an instant."""

    def looked_up(self, lookup: Lookup) -> None:
        """Called with each answer to a lookup."""

    def stepped(self, step: Step) -> None:
        """Called when a step and the decisions that it caused are complete."""

    def counted(self, time_ns: int, gauges: Gauges) -> None:
        """Called when an observation and the decisions that it caused are complete."""

    def idle(self, time_ns: int) -> None:
        """Called when no request is left to schedule."""
