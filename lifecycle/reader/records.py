"""What the reader keeps of each thing that a log is about, as plain data."""

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
    """How a life spent its time until it finished, in nanoseconds. Time without events counts for the state before."""

    queued_ns: int = 0
    """From its arrival until its first step, or until what that step loads has arrived."""
    running_ns: int = 0
    """The waits between the turns of a session included."""
    preempted_ns: int = 0
    """Without its blocks, and until what is loaded back has arrived."""

    @property
    def total_ns(self) -> int:
        """All of it."""
        return self.queued_ns + self.running_ns + self.preempted_ns

    def with_time_in(self, state: RequestState, duration_ns: int) -> Spent:
        """The same with more time in a state. In a forged log time may go backwards, which counts as none."""
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
    """One life of a request id, from its arrival until it is released or another one takes its id."""

    request_id: str
    ordinal: int
    num_prompt_tokens: int
    num_tokens: int
    """Prompt and output, as of the last event that has it. A rollback keeps those that were computed."""
    state: RequestState = RequestState.NEW
    sub_state: str = ""
    """Of an extension; empty where the state has none."""
    blocks: BlocksRegion = BlocksRegion.NONE
    is_partial: bool = False
    """Whether its beginning is not in the log, so that its state and counts are known only as far as events say."""
    is_state_known: bool = True
    """False for a partial life until an event tells its state."""
    arrived_at: int = 0
    """Sequence number of its arrival; 0: it is not known."""
    arrived_ns: int = 0
    state_since_ns: int = 0
    spent: Spent = Spent()
    """Before `state_since_ns`."""
    num_preemptions: int = 0
    num_tokens_before_preemption: int = 0
    """The most settled tokens that it ever lost. Tokens below that are computed again, if they are."""
    preempted_at: int = 0
    """Event of its last preemption; 0: none is known."""
    reset_at: int = 0
    """Event of the last reset that came while it held blocks; 0: none is known."""
    generation: int = 0
    num_failed_loads: int = 0
    skips_prefix_cache: bool = False
    """Whether vLLM takes no cached tokens for it."""
    is_salted: bool = False
    """Whether it has a `cache_salt`."""
    computes_first: bool = False
    """Its load failed, and no step has computed anything for it since."""
    moved_at: int = NEVER
    """The last observation at which its path changed; `NEVER`: none is known."""
    path_before: str = ""
    """Its path before that observation."""
    quarantined: bool = False
    quarantined_at: int = 0
    """Event of its first quarantine; 0: none is known."""
    stale_generation: int = NEVER
    """The generation that a reset has made stale; nothing of it may be saved."""
    counted_tokens: int = 0
    """Computed or scheduled tokens when they were last recorded."""
    decoding_since: int = NEVER
    """Number of the step since which it decodes one token a step without being recorded."""
    row: tuple[int, int] = (NEVER, 0)
    """Number of the last step that recorded it, and its computed tokens before that step."""
    settled: tuple[int, int] = (0, 0)
    """Tokens that were certainly written, as far as the log shows, and the event that says so; 0: only a bound."""
    settled_before: int = 0
    """How many it was before that event."""
    num_own: int = NEVER
    """Blocks at the front of its table that the next allocation does not give anew; `NEVER`: not known."""
    num_old: int = NEVER
    """The same of its last allocation."""
    finished_at: int = 0
    """Event of its end; 0: none is known."""
    held_at: int = NEVER
    """Event that held its blocks for a copy; `NEVER`: none is known."""
    keys: list[bytes] = msgspec.field(default_factory=list)
    """Of its chunks, from the first one on, as far as they were observed. It only grows: a cut makes another list."""

    @property
    def name(self) -> tuple[str, int, int]:
        """What a decision about it begins with: request id, ordinal, generation."""
        return self.request_id, self.ordinal, self.generation

    @property
    def path(self) -> str:
        """Its state, with the sub-state where it has one: "preempted.starving"; empty where it is not known."""
        if not self.is_state_known:
            return ""
        return f"{self.state}.{self.sub_state}" if self.sub_state else self.state.value

    @property
    def has_known_beginning(self) -> bool:
        """Whether its arrival was read, or the snapshot has it from which reading began."""
        return self.arrived_at > 0 or not self.is_partial

    @property
    def is_stale(self) -> bool:
        """Whether what it has computed is from before a reset."""
        return self.stale_generation == self.generation


@attrs.frozen(eq=False)
class Prefix:
    """The first chunks of a life."""

    ordinal: int
    """Of the life."""
    keys: Sequence[bytes]
    """Of the life's chunks. There may be more of them than the prefix has."""
    num_chunks: int

    @classmethod
    def of(cls, life: Life | None, num_chunks: int) -> Self:
        """The first chunks of the life, as far as their keys are known."""
        if life is None:
            return cls(NEVER, (), 0)
        return cls(life.ordinal, life.keys, max(0, min(num_chunks, len(life.keys))))

    @cached_property
    def key_set(self) -> frozenset[bytes]:
        """The keys of its chunks."""
        return frozenset(self.keys[: self.num_chunks])

    def has(self, chunk: int, key: bytes) -> bool:
        """Whether chunk number `chunk` is in it, and has this key."""
        return chunk < self.num_chunks and self.keys[chunk] == key


NO_PREFIX = Prefix(NEVER, (), 0)


class Copy(msgspec.Struct, gc=False):
    """One load or save that has not been settled."""

    sequence: int
    """Of the event that issued it."""
    job_id: int
    request_id: str
    ordinal: int
    """Of the life it was issued for."""
    generation: int
    is_load: bool
    is_async: bool
    chunks: tuple[int, ...]
    keys: tuple[bytes, ...]
    """Of these chunks, as far as they were observed when it was issued."""
    earlier_keys: tuple[tuple[int, bytes], ...]
    """(chunk, key) of chunks that end earlier inside the blocks of a save: its images contain them too."""
    slots: tuple[int, ...]
    block_ids: tuple[int, ...]
    prefix: Prefix
    """The chunks up to the last one that it reads or brings. For a tail: the whole chunks before it."""
    epoch: int
    """Resets before it was issued."""
    since_step: int
    """When it was issued, or asked after."""
    since_ns: int
    leaves_out: bool = False
    """Whether some pages of a save are not copied, because a window had left them."""
    is_asked_after: bool = False
    is_fenced: bool = False
    """Whether a step waits for it."""
    lost_at: int = 0
    """Of a load: the preemption or the end that took its blocks; 0: none did."""
    ranks_done: frozenset[int] = frozenset()
    ranks_failed: frozenset[int] = frozenset()
    is_before_forward: bool = False
    """Whether it is a save that must be over before its step computes anything."""
    num_tokens: int = 0
    """Tokens of a load or of a tail; 0 of a save of chunks."""
    delivered_at: int = 0
    """Sequence number of the `EffectsDelivered` with which it was handed out; 0 if none is in the log."""
    delivered_step: int = 0
    """Steps in the log when it was handed out."""
    awaited_at: int = 0
    """Sequence number of the first `EffectsDelivered` whose step had to wait for it; 0 if none is in the log."""
    asked_at: int = 0
    """Sequence number of the last `EffectsDelivered` that asked after it; 0 if none is in the log."""
    reminders: tuple[bool, ...] = ()
    """Of each reminder that was decided and not handed out, whether a step has to wait."""

    @property
    def filled(self) -> list[int]:
        """The blocks that a load fills: without those that stand in the table for what a window does not see."""
        return [block_id for slot, block_id in zip(self.slots, self.block_ids, strict=False) if slot != NO_SLOT]

    @property
    def life(self) -> tuple[str, int, int]:
        """What a decision about it begins with: request id, ordinal, generation."""
        return self.request_id, self.ordinal, self.generation


class Answer(NamedTuple):
    """The last answer to a lookup."""

    sequence: int
    """Of the event."""
    event: LookupAnswered
    promised: Prefix
    """The chunks that it lets the scheduler count on."""

    @property
    def life(self) -> tuple[str, int, int]:
        """Request id, ordinal, generation that it was given to."""
        return self.event.request_id, self.event.ordinal, self.event.generation


@attrs.frozen
class IssuedTail:
    """Tokens from `first_token` to before `end_token`, being saved or saved."""

    job_id: int
    sequence: int
    first_token: int
    end_token: int
    slots: tuple[int, ...]
    is_saved: bool = False
    load_id: int = 0
    """The last load that reads it; 0: none."""


class Departed(NamedTuple):
    """Why a chunk that once was committed cannot be looked up, and the event that took it away."""

    reason: str
    sequence: int
