"""What the tracker knows about one life of a request."""

from __future__ import annotations

from array import array

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.ranges import Count, Int64, JobId, LifeOrdinal, NumTokens, Slot, SumOfTokens, TimeNs
from kvledger.lifecycle.ranges import Sequence as SequenceNumber
from kvledger.lifecycle.states import BlocksRegion, CurrentRegion, FirstRegion, RequestState, TrustRegion


class Tail(msgspec.Struct):
    """The part-filled last chunk of a preempted request: page images that only this life of it may load.

    It has no chunk key, because it is no chunk: it ends where the request's written tokens ended.
    """

    job_id: JobId
    """The save that writes it."""
    first_token: NumTokens
    end_token: SumOfTokens
    """At most a chunk after `first_token`."""
    slots: tuple[Slot, ...]
    """One for each page that the tokens touch."""
    is_saved: bool = False
    load_id: JobId = 0
    """The last load that reads it; 0: none."""


class RequestRecord(msgspec.Struct):
    """One life of a request id."""

    request_id: str
    ordinal: LifeOrdinal
    """Names this life of the id. Ids may be used again, ordinals never are."""
    num_prompt_tokens: NumTokens
    num_tokens: SumOfTokens
    """Prompt and output tokens, as of the last event that has the number. A rollback keeps those that were computed."""

    # --- states; `table.py` says how they move -----------------------------------------------
    state: RequestState = RequestState.NEW
    sub: str = ""
    """The sub-state of an extension; empty if the state has none."""
    blocks: BlocksRegion = BlocksRegion.NONE
    first: FirstRegion = FirstRegion.COMPUTED
    current: CurrentRegion = CurrentRegion.CURRENT
    trust: TrustRegion = TrustRegion.TRUSTED
    state_since_ns: TimeNs = 0

    # --- counts --------------------------------------------------------------------------------
    generation: Count = 0
    """How often it lost what it had computed."""
    num_preemptions: Count = 0
    num_failed_loads: Count = 0
    num_tokens_before_preemption: NumTokens = 0
    """The most settled tokens that it ever lost. Tokens below that are computed again, if they are."""

    # --- what it holds -------------------------------------------------------------------------
    block_ids: array | None = None  # type: ignore[type-arg]  # in Python 3.11 it takes no argument when it runs
    """Its block table, 4 bytes a block, as vLLM gave it last; None while it holds no blocks."""
    lost_block_ids: array | None = None  # type: ignore[type-arg]
    """The table that it lost since the last step. The bytes are intact until the next step's forward pass."""
    window_freed_at: NumTokens | None = None
    """Tokens that were settled when its windows freed pages, since the last step; None: they freed none."""
    window_freed_before_step: NumTokens | None = None
    """The same before the last step. What its windows have freed since is intact until that step's forward pass."""

    # --- what was answered -----------------------------------------------------------------------
    answer: e.LookupAnswered | None = None
    """The last answer, until an allocation claims it. A refused preemption or a rollback leaves it: it may be of an
    earlier generation."""
    answered_at: SequenceNumber = 0
    """Sequence number of that answer."""
    claimed: e.LookupAnswered | None = None
    """The answer that its last allocation claimed; None if no lookup came before it."""
    num_deferrals: Count = 0
    """How often in a row the scheduler was asked to ask again."""
    deferred_for: JobId = 0
    """The copy for which the last lookup was deferred; 0 if it was answered."""
    wanted_boundary: Int64 = 0
    """Tokens after which a load could have ended if pages of a window had been stored; 0: none. Saves add them."""

    # --- what of it is dealt with --------------------------------------------------------------
    keys: list[bytes] = []
    """One for each chunk whose tokens are known, from the first on. A key hashes the chunk and all before it."""
    num_chunks_handled: NumTokens = 0
    """Chunks from the first on that need no save in this generation: saved, found saved, or declined."""
    tail: Tail | None = None
    """Only after a preemption, until it computes again or its tokens become doubtful."""
    num_local_tokens: NumTokens | None = None
    """What its last lookup said that vLLM's prefix cache has; kept only while a block is unfilled."""

    @property
    def path(self) -> str:
        """The state, with its sub-state where it has one: "preempted.starving"."""
        return f"{self.state}.{self.sub}" if self.sub else self.state.value

    @property
    def states(self) -> tuple[RequestState, BlocksRegion, FirstRegion, CurrentRegion, TrustRegion]:
        """What it is in now, in the order of `table.REGIONS`."""
        return self.state, self.blocks, self.first, self.current, self.trust

    @property
    def life(self) -> tuple[str, int, int]:
        """What a decision about it begins with: request id, ordinal, generation."""
        return self.request_id, self.ordinal, self.generation

    def next_deferral(self, job_id: int, *, is_shared: bool) -> int:
        """Return how often in a row lookups were deferred if the next one is, for this job.

        With `is_shared`, a load that was waited for before is not counted again: it ends by itself, in a report or as
        overdue.
        """
        count = self.num_deferrals
        return count if count and is_shared and self.deferred_for == job_id else count + 1
