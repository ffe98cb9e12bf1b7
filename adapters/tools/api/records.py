"""Frozen records with plain values that the API returns.

`start` is the name of a record's engine start. Times are nanoseconds since the log was opened; add
`Start.opened_at_unix_ns` for nanoseconds since 1970. `sequence` is the number of an event in its log.
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
    """One engine start and its logs."""

    name: str
    """Folder name of the start's main log. All records of this engine start have this name in `start`."""
    path: Path
    """The main log: the scheduler's, or a worker's if the scheduler has no log that can be read."""
    worker_paths: tuple[Path, ...]
    """Logs of this engine's workers. Only the recorder's workers write logs."""
    header: Mapping[str, object] = attrs.field(repr=False)
    """Header of the main log, key → value: versions, sizes, vocabulary. Empty if no copy of the header is intact."""
    opened_at_unix_ns: int | None
    """Time at which the main log was opened, in nanoseconds since 1970; None: unknown."""


@attrs.frozen(kw_only=True)
class Entry:
    """One event of a log, with its number and its time."""

    start: str
    rank: int | None
    """Rank of the worker that wrote the log; None: the scheduler wrote it."""
    sequence: int
    time_ns: int
    """Nanoseconds since the log was opened. A decision has the time of the observation that caused it."""
    event: Event

    @property
    def kind(self) -> str:
        """The event's id, such as `lookup.answered`."""
        return self.event.id

    @property
    def cause(self) -> int | None:
        """Sequence number of the observation that caused a decision; None for an observation."""
        cause: int | None = getattr(self.event, "cause", None)
        return cause

    def __str__(self) -> str:
        return visible(f"{self.sequence}  {milliseconds(self.time_ns)} ms  {event_text(self.event)}")


@attrs.frozen(kw_only=True)
class Life:
    """One life of a request id, from an arrival to its release."""

    ordinal: int
    """Number of the arrival, unique in a log."""
    first_sequence: int
    last_sequence: int
    """The life's events lie between `first_sequence` and `last_sequence`, both included."""
    arrived_ns: int
    finished_ns: int | None
    """When the request finished; None if the log does not contain this."""
    num_prompt_tokens: int
    num_tokens: int
    """Tokens of prompt and output."""
    outcome: str
    """vLLM's final status of the request. If the request has not finished, its last state in the log."""
    num_preemptions: int
    num_lookups: int
    num_tokens_loaded: int
    num_chunks_saved: int
    """Chunks of completed saves."""
    num_failures: int
    """Failed copies, refused loads, broken rules and failed hooks."""
    is_quarantined: bool
    queued_ns: int
    """Time from the arrival until the first step. If this step waits for a load, until the load is over."""
    running_ns: int
    """Time running, including the waits between the turns of a session."""
    preempted_ns: int
    """Time from each preemption until the request's next step. If the step waits for a load, until the load is over."""


@attrs.frozen(kw_only=True)
class Lookup:
    """A lookup: the scheduler asked what can be loaded for a request, and got an answer.

    `deferred_for_job` and `num_deferred` are set only if the answer was a deferral. In this case `num_hit_tokens`,
    `num_external_tokens` and `is_async` are None, and `miss_reason` is empty.
    """

    start: str
    sequence: int
    """Sequence number of the answer."""
    time_ns: int
    request_id: str
    ordinal: int
    generation: int
    num_computed_tokens: int
    """Tokens of the request that vLLM's own prefix cache has."""
    num_tokens: int
    """Tokens of prompt and output."""
    num_hit_tokens: int | None
    """Tokens that the lookup found, counted from the request's first token on."""
    num_external_tokens: int | None
    """Tokens offered."""
    is_async: bool | None
    """Whether steps can run during the load of the offered tokens."""
    miss_reason: str
    """Why the hit ends."""
    deferred_for_job: int | None
    """Job id of the copy for which the request has to wait."""
    num_deferred: int | None
    """Number of consecutive deferrals of the request, including this answer."""
    cause: int
    """Sequence number of the observation that caused the answer, such as `lookup.requested`."""


@attrs.frozen(kw_only=True)
class Copy:
    """A copy between blocks and the host pool. `sequence` and `time_ns` belong to the decision that issued it."""

    start: str
    sequence: int
    time_ns: int
    settled_sequence: int | None
    """Sequence number of the event that settled the copy; None: not in the log. `settled_ns`: time of this event."""
    settled_ns: int | None
    kind: str
    """`load`, `save` or `tail save`."""
    job_id: int
    request_id: str
    ordinal: int
    generation: int
    outcome: str
    """`completed`, `failed`, `given up` (a failed save whose slots a rank may still write), or `open` (not settled)."""
    error: str
    first_token: int | None
    """First token of a load or tail save; None for a save of whole chunks."""
    num_tokens: int | None
    """Number of tokens of a load or tail save; None for a save of whole chunks."""
    chunks: tuple[int, ...]
    """Numbers of the request's chunks that a save copies; empty for a load or tail save."""
    block_ids: tuple[int, ...]
    slots: tuple[int, ...]
    num_pages: int
    """Number of pages to copy."""
    is_async: bool
    """Whether steps go on during the copy."""
    before_forward: bool
    """Whether the copy is a save that must complete before the step's forward pass, because vLLM has already freed
    the blocks."""
    ranks_done: tuple[int, ...]
    ranks_failed: tuple[int, ...]
    num_bytes: int
    """Bytes that workers reported."""
    worker_ns: int
    """Sum of the nanoseconds that workers measured. If one report is about several copies, the time in the report is
    divided among these copies in proportion to their bytes."""


@attrs.frozen
class Advance:
    """One request in a step. A request that only decodes one more token has no such record."""

    ordinal: int
    num_computed_tokens: int
    """Computed tokens before the step."""
    num_scheduled_tokens: int
    num_tokens: int
    """Known tokens of prompt and output."""


@attrs.frozen(kw_only=True)
class Step:
    """One engine step. Requests that decode one token in each step are counted but not listed."""

    start: str
    sequence: int
    time_ns: int
    step: int
    """Number of the step."""
    num_scheduled_tokens: int
    """Scheduled tokens of all requests."""
    advanced: tuple[Advance, ...]
    paused: tuple[int, ...]
    """Ordinals of decoding requests that were not scheduled."""


@attrs.frozen(kw_only=True)
class Eviction:
    """Chunks evicted from the host pool because a save needed their slots."""

    start: str
    sequence: int
    time_ns: int
    keys: tuple[bytes, ...]
    """Keys of the chunks, in the order of eviction."""
    request_id: str
    """The request whose save needed the slots."""
    ordinal: int
    generation: int
    cause: int
    """Sequence number of the observation that caused the save."""


@attrs.frozen(kw_only=True)
class Reason:
    """Why vLLM had to compute consecutive tokens of a request, or compute them again."""

    start: str
    request_id: str
    ordinal: int
    of: str
    """What happened to the tokens: `admission` (left to compute when the request was admitted), `recomputed` (computed
    again after a preemption), `computed_twice` (computed again after a rollback), or `lookup` (not found by the last
    lookup of a request that has not been admitted)."""
    sequence: int
    """Sequence number of the admission, of the step that computed the tokens again, or of the lookup."""
    time_ns: int
    first_token: int
    end_token: int
    """The first token after these tokens."""
    code: ReasonCode
    evidence: tuple[int, ...]
    """Sequence numbers of the events that prove the reason."""
    text: str
    """The tokens and the reason in words."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return self.end_token - self.first_token

    def __str__(self) -> str:
        return visible(f"event {self.sequence}, {_OF[self.of]}: {self.text}")


_OF: Mapping[str, str] = {
    "admission": "left to compute",
    "recomputed": "computed again",
    "computed_twice": "computed again after a rollback",
    "lookup": "not found",
}
"""Value of `Reason.of` → words."""
