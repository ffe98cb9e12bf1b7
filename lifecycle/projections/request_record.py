"""What the tracker knows about one life of a request."""

from __future__ import annotations

from array import array

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.ranges import Count, Int64, JobId, LifeOrdinal, NumTokens, Slot, SumOfTokens, TimeNs
from kvledger.lifecycle.ranges import Sequence as SequenceNumber
from kvledger.lifecycle.states import BlocksRegion, CurrentRegion, FirstRegion, RequestState, TrustRegion


class Tail(msgspec.Struct):
    """The partly filled last chunk of a preempted request. Only the same life of the request may load it.

    The tail ends where the request's written tokens end. It is not a whole chunk, so it has no chunk key.
    """

    job_id: JobId
    """Id of the save that writes the tail."""
    first_token: NumTokens
    end_token: SumOfTokens
    """End of the tail, at most one chunk after `first_token`."""
    slots: tuple[Slot, ...]
    """One slot for each page that the tokens of the tail touch."""
    is_saved: bool = False
    load_id: JobId = 0
    """Id of the last load that reads the tail; 0 if there is none."""


class RequestRecord(msgspec.Struct):
    """One life of a request id."""

    request_id: str
    ordinal: LifeOrdinal
    """Number of this life. Request ids may be reused, ordinals never are."""
    num_prompt_tokens: NumTokens
    num_tokens: SumOfTokens
    """Number of prompt and output tokens, from the last event that has it. A rollback does not reduce it below the
    computed tokens."""

    # --- states; `table.py` has their transitions --------------------------------------------
    state: RequestState = RequestState.NEW
    sub: str = ""
    """Sub-state of an extension; empty if there is none."""
    blocks: BlocksRegion = BlocksRegion.NONE
    first: FirstRegion = FirstRegion.COMPUTED
    current: CurrentRegion = CurrentRegion.CURRENT
    trust: TrustRegion = TrustRegion.TRUSTED
    state_since_ns: TimeNs = 0

    # --- counts --------------------------------------------------------------------------------
    generation: Count = 0
    """Number of times that the request was preempted, rolled back to 0 tokens, or continued with a session's next
    turn."""
    num_preemptions: Count = 0
    num_failed_loads: Count = 0
    num_tokens_before_preemption: NumTokens = 0
    """Largest number of settled tokens at a preemption. Computing a token below this number is a recomputation."""

    # --- blocks --------------------------------------------------------------------------------
    block_ids: array | None = None  # type: ignore[type-arg]  # in Python 3.11 it takes no argument when it runs
    """Block table of the request as vLLM last gave it, 4 bytes per block; None while the request holds no blocks."""
    lost_block_ids: array | None = None  # type: ignore[type-arg]
    """Block table that the request lost since the last step; None if it lost none. The blocks keep their contents
    until the next step's forward pass."""
    window_freed_at: NumTokens | None = None
    """Number of settled tokens in the last `window.left`; None if there was no such event since the last step.

    Before that event, vLLM had freed only pages that no window saw at this number of settled tokens. All other pages
    are intact until the next step's forward pass.
    """
    window_freed_before_step: NumTokens | None = None
    """Value of `window_freed_at` before the last step. Pages that a window saw at that number of settled tokens are
    intact until the last step's forward pass."""

    # --- lookups -------------------------------------------------------------------------------
    answer: e.LookupAnswered | None = None
    """The last answer, until an allocation claims it.

    A refused preemption and a rollback keep the answer, so it may be from an earlier generation.
    """
    answered_at: SequenceNumber = 0
    """Sequence number of `answer`."""
    claimed: e.LookupAnswered | None = None
    """The answer that the last allocation claimed; None if no answer came before that allocation."""
    num_deferrals: Count = 0
    """Number of consecutive lookups that were deferred."""
    deferred_for: JobId = 0
    """Id of the copy for which the last lookup was deferred; 0 if it was answered."""
    wanted_boundary: Int64 = 0
    """Boundary at which a load could have ended if all pages that windows see there had been stored. Saves include
    these pages. 0 if there is no such boundary."""

    # --- chunks --------------------------------------------------------------------------------
    keys: list[bytes] = []
    """One key per chunk whose tokens are known, from chunk 0 on. A key hashes its chunk and all chunks before it."""
    num_chunks_handled: NumTokens = 0
    """Number of chunks, from chunk 0 on, that need no save in this generation: saved, found saved, or declined."""
    tail: Tail | None = None
    """Set after a preemption, until the request computes again or the tokens of the tail are in doubt; else None."""
    num_local_tokens: NumTokens | None = None
    """Number of tokens that vLLM's prefix cache had at the last lookup. Recorded only while a block is unfilled."""

    @property
    def path(self) -> str:
        """The state, with its sub-state if it has one: "preempted.starving"."""
        return f"{self.state}.{self.sub}" if self.sub else self.state.value

    @property
    def states(self) -> tuple[RequestState, BlocksRegion, FirstRegion, CurrentRegion, TrustRegion]:
        """The current states, in the order of `table.REGIONS`."""
        return self.state, self.blocks, self.first, self.current, self.trust

    @property
    def life(self) -> tuple[str, int, int]:
        """Request id, ordinal and generation: the first fields of a decision about this life."""
        return self.request_id, self.ordinal, self.generation

    def next_deferral(self, job_id: int, *, is_shared: bool) -> int:
        """Return the number of consecutive deferrals, including a new deferral for this job.

        With `is_shared`, a further deferral for the same load does not count. Such a wait always ends: the load is
        reported or becomes overdue.
        """
        count = self.num_deferrals
        return count if count and is_shared and self.deferred_for == job_id else count + 1
