"""The reader's records of lives, copies, answers and tails, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, NamedTuple, Self

import attrs
import msgspec

from kvledger.lifecycle import ranges
from kvledger.lifecycle.events import NO_SLOT, LookupAnswered
from kvledger.lifecycle.ranges import MAX_INT64, MAX_NS, Count, Generation, JobId, Ordinal, SumOfTokens, TimeNs
from kvledger.lifecycle.states import BlocksRegion, RequestState

NEVER = -1
_OrNever = Annotated[int, msgspec.Meta(ge=NEVER, le=MAX_INT64)]
"""A number from 0, or `NEVER`. All types of stored records have limits, so a manipulated snapshot is refused."""


class Spent(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Nanoseconds that a life spent in its states before it finished.

    The time between two events counts for the state after the first event.
    """

    queued_ns: TimeNs = 0
    """Nanoseconds in `new`: from the arrival until the first step, or until the load of that step is over."""
    running_ns: TimeNs = 0
    """Nanoseconds in `chunked_prefill` and `running`, including the waits between the turns of a session."""
    preempted_ns: TimeNs = 0
    """Nanoseconds in `preempted` and `recovering`: from a preemption until the request has computed tokens again."""

    @property
    def total_ns(self) -> int:
        """Sum of the three times, in nanoseconds."""
        return self.queued_ns + self.running_ns + self.preempted_ns

    def with_time_in(self, state: RequestState, duration_ns: int) -> Spent:
        """Return these times plus a duration in a state.

        In a manipulated log a duration may be negative, which counts as 0. A time is at most `MAX_NS`.
        """

        def longer(time_ns: int) -> int:
            return min(MAX_NS, time_ns + max(0, duration_ns))

        match state:
            case RequestState.NEW:
                return Spent(longer(self.queued_ns), self.running_ns, self.preempted_ns)
            case RequestState.PREEMPTED | RequestState.RECOVERING:
                return Spent(self.queued_ns, self.running_ns, longer(self.preempted_ns))
            case RequestState.FINISHED:
                return self
            case _:
                return Spent(self.queued_ns, longer(self.running_ns), self.preempted_ns)


class Life(msgspec.Struct, gc=False, eq=False):
    """One life of a request id, from its arrival until it is released or its id is used again.

    Fields that end in `_at` are sequence numbers of events, 0 if there is no such event.
    """

    request_id: str
    ordinal: Ordinal
    num_prompt_tokens: SumOfTokens
    num_tokens: SumOfTokens
    """Number of prompt and output tokens, from the last event with this number. A rollback does not reduce it below the
    computed tokens."""
    state: RequestState = RequestState.NEW
    sub_state: str = ""
    """Sub-state of an extension; empty if the life is in none."""
    blocks: BlocksRegion = BlocksRegion.NONE
    is_partial: bool = False
    """Whether events of the life may be missing. State and counts are then known only as later events show them."""
    is_state_known: bool = True
    """Whether `state` is known. False for a life that begins after a gap, until an event shows its state."""
    arrived_at: ranges.Sequence = 0
    arrived_ns: TimeNs = 0
    state_since_ns: TimeNs = 0
    spent: Spent = Spent()
    """Time spent before `state_since_ns`."""
    num_preemptions: Count = 0
    num_tokens_before_preemption: SumOfTokens = 0
    """Largest number of settled tokens at a preemption of the life. Computing a token below it is a recomputation."""
    preempted_at: ranges.Sequence = 0
    """Its last preemption."""
    reset_at: ranges.Sequence = 0
    """Sequence number of the last reset at which the life held blocks."""
    generation: Generation = 0
    num_failed_loads: Count = 0
    skips_prefix_cache: bool = False
    """Whether vLLM uses no cached tokens for the request."""
    is_salted: bool = False
    """Whether the request has a `cache_salt`."""
    computes_first: bool = False
    """Whether a load of the life failed, and no step has computed anything for the request since."""
    moved_at: _OrNever = NEVER
    """Sequence number of the last observation at which `path` changed; `NEVER` if none is known."""
    path_before: str = ""
    """Value of `path` before the observation `moved_at`."""
    quarantined: bool = False
    quarantined_at: ranges.Sequence = 0
    """Its first quarantine."""
    stale_generation: _OrNever = NEVER
    """Generation with KV from before a reset, of which nothing may be saved; `NEVER` if there is none."""
    counted_tokens: SumOfTokens = 0
    """Number of tokens computed or in flight, when last counted. It stays the same while the life is steady."""
    decoding_since: _OrNever = NEVER
    """Number of steps in the log when the life became steady; `NEVER` if it is not steady."""
    row: tuple[int, int] = (NEVER, 0)
    """(number of the last step that has a row for the life, computed tokens in that row)."""
    settled: tuple[int, int] = (0, 0)
    """(settled tokens, sequence number of the event that shows this number; 0 if the number is only a bound)."""
    settled_before: SumOfTokens = 0
    """Number of settled tokens before the event in `settled`."""
    num_own: _OrNever = NEVER
    """Number of blocks at the front of the next allocation's table that are not new; `NEVER` if not known."""
    num_old: _OrNever = NEVER
    """Number of blocks at the front of the last allocation's table that were not new; `NEVER` if not known."""
    finished_at: ranges.Sequence = 0
    held_at: _OrNever = NEVER
    """Sequence number of the `blocks.held` event of the life; `NEVER` if there is none."""
    keys: list[bytes] = msgspec.field(default_factory=list)
    """Keys of the chunks from the first one on, as far as they were observed. The list only grows; if keys become
    invalid, a new list replaces it."""

    @property
    def name(self) -> tuple[str, int, int]:
        """(request id, ordinal, generation): the first fields of a decision about the life."""
        return self.request_id, self.ordinal, self.generation

    @property
    def path(self) -> str:
        """State and sub-state, as in "preempted.starving"; empty if the state is not known."""
        if not self.is_state_known:
            return ""
        return f"{self.state}.{self.sub_state}" if self.sub_state else self.state.value

    @property
    def has_known_beginning(self) -> bool:
        """Whether the reader has seen the life's arrival, or began at a snapshot that has it."""
        return self.arrived_at > 0 or not self.is_partial

    @property
    def is_stale(self) -> bool:
        """Whether the KV of the life is from before a reset."""
        return self.stale_generation == self.generation


@attrs.frozen(eq=False)
class Prefix:
    """The first chunks of a life."""

    ordinal: int
    keys: Sequence[bytes]
    """All known keys of the life. The prefix has the first `num_chunks` of them."""
    num_chunks: int

    @classmethod
    def of(cls, life: Life | None, num_chunks: int) -> Self:
        """Return the first `num_chunks` chunks of the life, or fewer if fewer keys are known."""
        if life is None:
            return cls(NEVER, (), 0)
        return cls(life.ordinal, life.keys, max(0, min(num_chunks, len(life.keys))))

    @cached_property
    def key_set(self) -> frozenset[bytes]:
        """The keys of its chunks."""
        return frozenset(self.keys[: self.num_chunks])

    def has(self, chunk: int, key: bytes) -> bool:
        """Whether the prefix contains chunk number `chunk` with this key."""
        return chunk < self.num_chunks and self.keys[chunk] == key


NO_PREFIX = Prefix(NEVER, (), 0)


class Copy(msgspec.Struct, gc=False):
    """One load or save that has not been settled.

    Fields that end in `_at` are sequence numbers of events, 0 if there is no such event.
    """

    sequence: ranges.Sequence
    """Sequence number of the event that issued the copy."""
    job_id: JobId
    request_id: str
    ordinal: Ordinal
    """Ordinal of the life for which the copy was issued."""
    generation: Generation
    is_load: bool
    is_async: bool
    chunks: tuple[int, ...]
    keys: tuple[bytes, ...]
    """Keys of `chunks`, as far as they were known when the copy was issued."""
    earlier_keys: tuple[tuple[int, bytes], ...]
    """(chunk, key) of earlier chunks in the blocks of a save. The saved pages contain these chunks, too."""
    slots: tuple[int, ...]
    block_ids: tuple[int, ...]
    prefix: Prefix
    """The chunks up to the last one that the copy reads or adds. For a tail: the whole chunks before the tail."""
    epoch: Count
    """Number of cache resets before the copy was issued."""
    since_step: Count
    """Number of steps when the copy was issued, a step last had to wait for it, or workers were first asked about it.

    The latest of these moments counts.
    """
    since_ns: TimeNs
    leaves_out: bool = False
    """Whether the copy leaves out pages because of windows."""
    is_asked_after: bool = False
    is_fenced: bool = False
    """Whether a step waits for the copy because the request lost the blocks of the copy."""
    lost_at: ranges.Sequence = 0
    """Sequence number of the `RequestPreempted` or `RequestFinished` that took the blocks of the copy."""
    ranks_done: frozenset[int] = frozenset()
    ranks_failed: frozenset[int] = frozenset()
    is_before_forward: bool = False
    """Whether the copy is a save that must be over before its step computes anything."""
    num_tokens: SumOfTokens = 0
    """Number of tokens of a load or of a tail; 0 for a save of chunks."""
    delivered_at: ranges.Sequence = 0
    """Sequence number of the `EffectsDelivered` that handed out the copy."""
    delivered_step: Count = 0
    """Number of steps in the log when the copy was handed out."""
    awaited_at: ranges.Sequence = 0
    """Sequence number of the first `EffectsDelivered` whose step had to wait for the copy."""
    asked_at: ranges.Sequence = 0
    """Sequence number of the last `EffectsDelivered` that asked the workers about the copy."""
    reminders: tuple[bool, ...] = ()
    """For each reminder that was decided and not handed out: whether a step has to wait for the copy."""

    @property
    def filled(self) -> list[int]:
        """The blocks that a load fills. Blocks of pages outside a window are left out."""
        return [block_id for slot, block_id in zip(self.slots, self.block_ids, strict=False) if slot != NO_SLOT]

    @property
    def life(self) -> tuple[str, int, int]:
        """(request id, ordinal, generation): the first fields of a decision about the copy."""
        return self.request_id, self.ordinal, self.generation


class Answer(NamedTuple):
    """One answer to a lookup."""

    sequence: int
    event: LookupAnswered
    promised: Prefix
    """The chunks up to the end of the offered tokens; empty if no token is offered."""

    @property
    def life(self) -> tuple[str, int, int]:
        """(request id, ordinal, generation) of the request that got the answer."""
        return self.event.request_id, self.event.ordinal, self.event.generation


@attrs.frozen
class IssuedTail:
    """A tail that is being saved or is saved: the tokens from `first_token` to before `end_token`."""

    job_id: int
    sequence: int
    first_token: int
    end_token: int
    slots: tuple[int, ...]
    is_saved: bool = False
    load_id: int = 0
    """Job id of the last load that reads the tail; 0 if none does."""


class Departed(NamedTuple):
    """Why a committed chunk cannot be looked up any more, and the sequence number of the event that removed it."""

    reason: str
    sequence: int
