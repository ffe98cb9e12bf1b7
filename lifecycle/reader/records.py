"""What the reader stores about each thing in a log, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Self

import attrs
import msgspec

from kvledger.lifecycle.events import NO_SLOT, LookupAnswered
from kvledger.lifecycle.states import BlocksRegion, RequestState

NEVER = -1


class Spent(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Time that a life spent before it finished, in nanoseconds. Time without events counts for the state before."""

    queued_ns: int = 0
    """From its arrival until its first step, or until that step's load is over."""
    running_ns: int = 0
    """Includes the waits between the turns of a session."""
    preempted_ns: int = 0
    """Without its blocks, and until its KV is loaded again."""

    @property
    def total_ns(self) -> int:
        """Sum of the three, in nanoseconds."""
        return self.queued_ns + self.running_ns + self.preempted_ns

    def with_time_in(self, state: RequestState, duration_ns: int) -> Spent:
        """Return these times with more time in one state. Negative time, as in a manipulated log, counts as none."""
        duration_ns = max(0, duration_ns)
        match state:
            case RequestState.NEW:
                return Spent(self.queued_ns + duration_ns, self.running_ns, self.preempted_ns)
            case RequestState.PREEMPTED | RequestState.RECOVERING:
                return Spent(self.queued_ns, self.running_ns, self.preempted_ns + duration_ns)
            case RequestState.FINISHED:
                return self
            case _:
                return Spent(self.queued_ns, self.running_ns + duration_ns, self.preempted_ns)


class Life(msgspec.Struct, gc=False, eq=False):
    """One life of a request id, from its arrival until it is released or its id is used again.

    Fields with `_at` are sequence numbers of events, 0 if none is known.
    """

    request_id: str
    ordinal: int
    num_prompt_tokens: int
    num_tokens: int
    """Prompt and output tokens in the last event that has them. A rollback does not remove computed ones."""
    state: RequestState = RequestState.NEW
    sub_state: str = ""
    """Sub-state of an extension; empty if there is none."""
    blocks: BlocksRegion = BlocksRegion.NONE
    is_partial: bool = False
    """Whether its beginning is not in the log, so that state and counts are known only as far as events have them."""
    is_state_known: bool = True
    """Whether its state is known. False for a partial life until an event shows it."""
    arrived_at: int = 0
    arrived_ns: int = 0
    state_since_ns: int = 0
    spent: Spent = Spent()
    """Time spent before `state_since_ns`."""
    num_preemptions: int = 0
    num_tokens_before_preemption: int = 0
    """Largest number of settled tokens that it has lost. Computing a token below it means to recompute."""
    preempted_at: int = 0
    """Its last preemption."""
    reset_at: int = 0
    """The last reset while it held blocks."""
    generation: int = 0
    num_failed_loads: int = 0
    skips_prefix_cache: bool = False
    """Whether vLLM uses no cached tokens for it."""
    is_salted: bool = False
    """Whether it has a `cache_salt`."""
    computes_first: bool = False
    """Whether its load failed and no step has computed anything for it since."""
    moved_at: int = NEVER
    """The last observation at which its path changed; `NEVER` if none is known."""
    path_before: str = ""
    """Its path before that observation."""
    quarantined: bool = False
    quarantined_at: int = 0
    """Its first quarantine."""
    stale_generation: int = NEVER
    """Generation that a reset made stale, of which nothing may be saved."""
    counted_tokens: int = 0
    """Computed or scheduled tokens when they were last recorded."""
    decoding_since: int = NEVER
    """Number of the step since which it decodes one token per step without a row in `StepScheduled`."""
    row: tuple[int, int] = (NEVER, 0)
    """Number of the last step that recorded it, and its computed tokens before that step."""
    settled: tuple[int, int] = (0, 0)
    """(tokens that are certainly written, event that shows this); the event is 0 if the number is only a bound."""
    settled_before: int = 0
    """Settled tokens before that event."""
    num_own: int = NEVER
    """Blocks at the front of its table that the next allocation does not newly give; `NEVER` if not known."""
    num_old: int = NEVER
    """Likewise, at its last allocation."""
    finished_at: int = 0
    held_at: int = NEVER
    """The event that held its blocks for a copy; `NEVER` if none is known."""
    keys: list[bytes] = msgspec.field(default_factory=list)
    """Keys of its first chunks that were observed. The list only grows; a cut replaces it."""

    @property
    def name(self) -> tuple[str, int, int]:
        """(request id, ordinal, generation), the first fields of a decision about it."""
        return self.request_id, self.ordinal, self.generation

    @property
    def path(self) -> str:
        """State and sub-state, as in "preempted.starving"; empty if the state is not known."""
        if not self.is_state_known:
            return ""
        return f"{self.state}.{self.sub_state}" if self.sub_state else self.state.value

    @property
    def has_known_beginning(self) -> bool:
        """Whether the reader has seen its arrival, or started from a snapshot that has it."""
        return self.arrived_at > 0 or not self.is_partial

    @property
    def is_stale(self) -> bool:
        """Whether its KV is from before a reset."""
        return self.stale_generation == self.generation


@attrs.frozen(eq=False)
class Prefix:
    """The first chunks of a life."""

    ordinal: int
    keys: Sequence[bytes]
    """The life's keys, which may be more than those of the prefix."""
    num_chunks: int

    @classmethod
    def of(cls, life: Life | None, num_chunks: int) -> Self:
        """Return the first chunks of the life whose keys are known."""
        if life is None:
            return cls(NEVER, (), 0)
        return cls(life.ordinal, life.keys, max(0, min(num_chunks, len(life.keys))))

    @cached_property
    def key_set(self) -> frozenset[bytes]:
        """The keys of its chunks."""
        return frozenset(self.keys[: self.num_chunks])

    def has(self, chunk: int, key: bytes) -> bool:
        """Whether it contains chunk number `chunk` with this key."""
        return chunk < self.num_chunks and self.keys[chunk] == key


NO_PREFIX = Prefix(NEVER, (), 0)


class Copy(msgspec.Struct, gc=False):
    """One load or save that has not been settled.

    Fields with `_at` are sequence numbers of events, 0 if there is none.
    """

    sequence: int
    """Sequence number of the event that issued it."""
    job_id: int
    request_id: str
    ordinal: int
    """Ordinal of the life that it was issued for."""
    generation: int
    is_load: bool
    is_async: bool
    chunks: tuple[int, ...]
    keys: tuple[bytes, ...]
    """Keys of the chunks that were known when it was issued."""
    earlier_keys: tuple[tuple[int, bytes], ...]
    """(chunk, key) of earlier chunks in the blocks of a save, which its images contain too."""
    slots: tuple[int, ...]
    block_ids: tuple[int, ...]
    prefix: Prefix
    """The chunks up to the last one that the copy reads or adds. For a tail: the whole chunks before the tail."""
    epoch: int
    """Number of resets before it was issued."""
    since_step: int
    """Steps in the log when it was issued, or when the workers were asked about it."""
    since_ns: int
    leaves_out: bool = False
    """Whether it is a save that leaves out pages because a window had left them."""
    is_asked_after: bool = False
    is_fenced: bool = False
    """Whether a step waits for it."""
    lost_at: int = 0
    """The preemption or end that took the blocks of a load."""
    ranks_done: frozenset[int] = frozenset()
    ranks_failed: frozenset[int] = frozenset()
    is_before_forward: bool = False
    """Whether it is a save that must end before its step computes anything."""
    num_tokens: int = 0
    """Tokens of a load or of a tail; 0 for a save of chunks."""
    delivered_at: int = 0
    """The `EffectsDelivered` that handed it out."""
    delivered_step: int = 0
    """Steps in the log when it was handed out."""
    awaited_at: int = 0
    """The first `EffectsDelivered` whose step had to wait for it."""
    asked_at: int = 0
    """The last `EffectsDelivered` that asked the workers about it."""
    reminders: tuple[bool, ...] = ()
    """Whether a step has to wait, for each reminder that was decided and not handed out."""

    @property
    def filled(self) -> list[int]:
        """The blocks that a load fills, without those of pages that a window does not see."""
        return [block_id for slot, block_id in zip(self.slots, self.block_ids, strict=False) if slot != NO_SLOT]

    @property
    def life(self) -> tuple[str, int, int]:
        """(request id, ordinal, generation), the first fields of a decision about it."""
        return self.request_id, self.ordinal, self.generation


class Answer(NamedTuple):
    """The last answer to a lookup."""

    sequence: int
    event: LookupAnswered
    promised: Prefix
    """The chunks that it promises to the scheduler."""

    @property
    def life(self) -> tuple[str, int, int]:
        """(request id, ordinal, generation) that it was given to."""
        return self.event.request_id, self.event.ordinal, self.event.generation


@attrs.frozen
class IssuedTail:
    """Tokens from `first_token` to before `end_token`, which are being saved or saved."""

    job_id: int
    sequence: int
    first_token: int
    end_token: int
    slots: tuple[int, ...]
    is_saved: bool = False
    load_id: int = 0
    """Job id of the last load that reads it; 0 if none does."""


class Departed(NamedTuple):
    """Why a once committed chunk cannot be looked up, and the event that removed it."""

    reason: str
    sequence: int
