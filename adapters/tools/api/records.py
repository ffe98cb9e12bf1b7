"""What a log is made of, as a program is given it: frozen records with plain values.

Each record names its engine start by `start`, the name of that start's log. Times are nanoseconds since the log was
opened; `Start.opened_at_unix_ns` makes them times of day. `sequence` is the number of an event in its log.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs

from kvledger.adapters.tools.logs.describe import event_text
from kvledger.adapters.tools.logs.visible import visible
from kvledger.adapters.tools.reasons import Reason as ReasonCode
from kvledger.adapters.units import milliseconds
from kvledger.lifecycle.events import Event


@attrs.frozen(kw_only=True)
class Start:
    """One start of an engine, and the logs that it left."""

    name: str
    """Name of the folder of its log. All records of this start have it."""
    path: Path
    """The scheduler's log, or the last worker's if the scheduler left none."""
    worker_paths: tuple[Path, ...]
    """Logs of workers. Only a recorded connector has them."""
    header: Mapping[str, object] = attrs.field(repr=False)
    """What the log says about itself: versions, sizes, vocabulary. Empty if no copy of it is intact."""
    opened_at_unix_ns: int | None
    """Nanoseconds since 1970 at which the log was opened; None: not known."""


@attrs.frozen(kw_only=True)
class Entry:
    """One event of a log, with its place and its time."""

    start: str
    rank: int | None
    """The worker that wrote the log; None: the scheduler."""
    sequence: int
    time_ns: int
    """A decision has the time of the observation that it was made on."""
    event: Event

    @property
    def kind(self) -> str:
        """The event's id, such as `lookup.answered`."""
        return self.event.id

    @property
    def cause(self) -> int | None:
        """Sequence number of the observation that a decision was made on; None of an observation."""
        cause: int | None = getattr(self.event, "cause", None)
        return cause

    def __str__(self) -> str:
        return visible(f"{self.sequence}  {milliseconds(self.time_ns)} ms  {event_text(self.event)}")


@attrs.frozen(kw_only=True)
class Life:
    """One life of a request id, from an arrival to its release. An id that is used again has another one."""

    ordinal: int
    """Counts arrivals; unique in a log."""
    first_sequence: int
    last_sequence: int
    """Its own events are from `first_sequence` to `last_sequence`."""
    arrived_ns: int
    finished_ns: int | None
    """None if the log has no end of it."""
    num_prompt_tokens: int
    num_tokens: int
    """Tokens of prompt and output."""
    outcome: str
    """vLLM's status at the end, or else the state in which the log leaves it. Empty if the log says neither."""
    num_preemptions: int
    num_lookups: int
    num_tokens_loaded: int
    num_chunks_saved: int
    """Chunks of completed saves."""
    num_failures: int
    """Failed copies, refused loads, broken rules and failed hooks."""
    is_quarantined: bool
    queued_ns: int
    """From its arrival until its first step, or until what that step loads has arrived."""
    running_ns: int
    """The waits between the turns of a session included."""
    preempted_ns: int
    """Without its blocks, and until what was loaded back had arrived."""


@attrs.frozen(kw_only=True)
class Lookup:
    """The scheduler asked what can be loaded for a request, and was answered."""

    start: str
    sequence: int
    """Of the answer."""
    time_ns: int
    request_id: str
    ordinal: int
    generation: int
    num_computed_tokens: int
    """Tokens that vLLM's own prefix cache has."""
    num_tokens: int
    """Tokens of prompt and output."""
    num_hit_tokens: int | None
    """Tokens of the prefix that can be loaded; None if the answer was to ask again."""
    num_external_tokens: int | None
    """Tokens that were offered; None if the answer was to ask again."""
    is_async: bool | None
    """Whether the load runs between steps; None if the answer was to ask again."""
    miss_reason: str
    """Why the hit ends where it ends; empty if the answer was to ask again."""
    deferred_for_job: int | None
    """Id of the copy that is waited for if the answer was to ask again, else None."""
    num_deferred: int | None
    """How often in a row the answer was to ask again; None if it was not."""
    cause: int
    """Sequence number of the question."""


@attrs.frozen(kw_only=True)
class Copy:
    """A copy between blocks and the host pool, from the decision to its settlement."""

    start: str
    sequence: int
    """Of the decision."""
    time_ns: int
    """Of the decision."""
    settled_sequence: int | None
    """None if the log does not have its end, like `settled_ns`."""
    settled_ns: int | None
    kind: str
    """`load`, `save` or `tail save`."""
    job_id: int
    request_id: str
    ordinal: int
    generation: int
    outcome: str
    """`completed`, `failed`, `given up` (a rank never reported it), or `open`: the log does not have its end."""
    error: str
    first_token: int | None
    """Of loads and tail saves."""
    num_tokens: int | None
    """Of loads and tail saves."""
    chunks: tuple[int, ...]
    """Numbers of the chunks in their request, of saves."""
    block_ids: tuple[int, ...]
    slots: tuple[int, ...]
    num_pages: int
    """Block pages that move."""
    is_async: bool
    """Whether steps go on meanwhile."""
    before_forward: bool
    """Whether it precedes the step's forward, because its blocks are free already."""
    ranks_done: tuple[int, ...]
    ranks_failed: tuple[int, ...]
    num_bytes: int
    """Bytes that workers reported."""
    worker_ns: int
    """Time that workers measured, added up over their reports."""


@attrs.frozen
class Advance:
    """What one step says of one request that did not just decode one more token."""

    ordinal: int
    num_computed_tokens: int
    """Before the step."""
    num_scheduled_tokens: int
    num_tokens: int
    """Tokens of prompt and output that are known."""


@attrs.frozen(kw_only=True)
class Step:
    """One engine step. A request that decodes one token in each step is counted and not listed."""

    start: str
    sequence: int
    time_ns: int
    step: int
    """Counts the engine's steps."""
    num_scheduled_tokens: int
    """Tokens of all requests."""
    advanced: tuple[Advance, ...]
    paused: tuple[int, ...]
    """Ordinals of decoding requests that were not scheduled."""


@attrs.frozen(kw_only=True)
class Eviction:
    """Chunks left the host pool because a save needed their slots."""

    start: str
    sequence: int
    time_ns: int
    keys: tuple[bytes, ...]
    """In the order in which they left."""
    request_id: str
    """The request whose save needed the slots."""
    ordinal: int
    generation: int
    cause: int
    """Sequence number of the observation that the save was decided on."""


@attrs.frozen(kw_only=True)
class Reason:
    """Why neighbouring tokens of a request were left to compute, or were computed again."""

    start: str
    request_id: str
    ordinal: int
    of: str
    """What the tokens are of: `admission` (left to compute when blocks were given), `recomputed` (computed again after
    a preemption), `computed_twice` (after a rollback), or `lookup` (not found, and no blocks were given since)."""
    sequence: int
    """Of that event."""
    time_ns: int
    first_token: int
    end_token: int
    """The first token after them."""
    code: ReasonCode
    evidence: tuple[int, ...]
    """Sequence numbers of the events that prove it."""
    text: str
    """The tokens and the reason in words."""

    @property
    def num_tokens(self) -> int:
        """How many tokens."""
        return self.end_token - self.first_token

    def __str__(self) -> str:
        return visible(f"event {self.sequence}, {_OF[self.of]}: {self.text}")


_OF: Mapping[str, str] = {
    "admission": "left to compute",
    "recomputed": "computed again",
    "computed_twice": "computed again after a rollback",
    "lookup": "not found",
}
"""What tokens are of → the same in words."""
