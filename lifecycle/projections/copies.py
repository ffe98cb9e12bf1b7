"""What is known about one copy, and about the ends that vLLM waits for of one life of a request."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.ranges import (
    BlockId,
    ChunkNumber,
    Count,
    Generation,
    Int64,
    JobId,
    Ordinal,
    Sequence,
    Slot,
    TimeNs,
)
from kvledger.lifecycle.states import SourceRegion, WorkRegion

PageJob = e.LoadIssued | e.SaveIssued | e.TailSaveIssued
"""The decision to copy pages, which a worker carries out."""


class CopyKind(enum.StrEnum):
    """Whether pages move to the device or from it."""

    LOAD = "load"
    SAVE = "save"


class Copy(msgspec.Struct, gc=False):
    """One load or save, until it is settled and nothing of it is owed.

    A copy is known by the number of its job, never by its request. The request may be preempted or finished, or its id
    used again, while bytes still move.
    """

    # --- what was decided ----------------------------------------------------------------------
    job_id: JobId
    kind: CopyKind
    request_id: str
    ordinal: Ordinal
    generation: Generation
    slots: tuple[Slot, ...]
    block_ids: tuple[BlockId, ...]
    is_async: bool

    # --- how far it is; `table.py` says how these two move -------------------------------------
    work: WorkRegion = WorkRegion.ISSUED
    source: SourceRegion = SourceRegion.OWNED
    ranks_done: tuple[Int64, ...] = ()
    """Ascending, as all ranks here."""
    ranks_failed: tuple[Int64, ...] = ()
    repeated_ranks: tuple[Int64, ...] = ()
    """Ranks in the last report that had reported before, without being asked."""
    error: str = ""

    # --- what it means for the cache -----------------------------------------------------------
    chunks: tuple[ChunkNumber, ...] = ()
    keys: tuple[bytes, ...] = ()
    """Of the chunks, as the request had them when the copy was issued."""
    earlier_keys: tuple[tuple[ChunkNumber, bytes], ...] = ()
    """(chunk, key) of chunks that end earlier inside the blocks of a save: its images contain them too."""
    epoch: Count = 0
    """How often everything cached had been reset when it was issued."""
    asked_step: Count = 0
    """The step in which it was issued, or asked after."""
    asked_ns: TimeNs = 0
    is_doubtful: bool = False
    """A save whose source blocks turned out not to hold what they should; its chunks are not offered."""

    @property
    def is_load(self) -> bool:
        """Whether it is a load, and no save."""
        return self.kind is CopyKind.LOAD

    @property
    def life(self) -> tuple[str, int, int]:
        """What a decision about it begins with: request id, ordinal, generation."""
        return self.request_id, self.ordinal, self.generation


class LoadEnd(enum.StrEnum):
    """The end of a life's asynchronous load, of which vLLM is to hear once."""

    NONE = "none"
    CLAIMED = "claimed"
    """Blocks were given for it; no load is issued yet."""
    UNDER_WAY = "under_way"
    ARRIVED = "arrived"
    """It is in place; the connector reports it to vLLM."""
    FAILED = "failed"
    """The workers are to be told to report it."""
    WITH_WORKERS = "with_workers"
    """The workers report that it failed; vLLM does not have it yet."""


class BlocksEnd(enum.StrEnum):
    """Why vLLM keeps the blocks of a life that has ended."""

    NONE = "none"
    KEPT_FOR_LOAD = "kept_for_load"
    """Its load has not ended. The end of the load frees the blocks."""
    KEPT_FOR_COPY = "kept_for_copy"
    """Saves read them."""
    FREE_AGAIN = "free_again"
    """No save reads them any more; the workers are to be told to report it."""
    WITH_WORKERS = "with_workers"
    """The workers report that they are free; vLLM does not have it yet."""


class OwedEnds(msgspec.Struct):
    """What vLLM is told, or was promised, about one life."""

    request_id: str
    is_promised: bool = False
    """Whether its last lookup was answered with an asynchronous load."""
    load: LoadEnd = LoadEnd.NONE
    load_id: JobId = 0
    """The load under way. A second load of the life ends for nobody."""
    blocks: BlocksEnd = BlocksEnd.NONE


class Issued(msgspec.Struct):
    """A copy that no worker has been given."""

    sequence: Sequence
    job: PageJob


class Reminder(msgspec.Struct):
    """A reminder of a copy that no worker has been given."""

    sequence: Sequence
    awaited: e.TransferAwaited


class Channel(enum.StrEnum):
    """To whom something is owed."""

    WORKERS = "workers"
    VLLM = "vllm"


class Ready(msgspec.Struct, frozen=True):
    """What is owed now on one channel; lives are ordinals, with their request ids."""

    jobs: tuple[PageJob, ...] = ()
    """In the order in which they were issued."""
    late: tuple[PageJob, ...] = ()
    """Jobs of a step that went without them: to be reported as failed, never to be handed out."""
    awaited: tuple[e.TransferAwaited, ...] = ()
    block_ids: tuple[int, ...] = ()
    """Blocks that vLLM counts on and that nothing will fill."""
    failed: Mapping[int, str] = {}
    """Lives whose asynchronous load failed; each worker reports them to vLLM."""
    sent: Mapping[int, str] = {}
    """Ended lives whose blocks nobody reads any more; each worker reports them to vLLM."""
    received: Mapping[int, str] = {}
    """Lives whose asynchronous load is in place; the connector itself reports it to vLLM."""
    reported: tuple[int, ...] = ()
    """Lives whose end vLLM has by now from the workers."""


NOTHING_OWED = Ready()
"""What is ready on a channel on which nothing is owed."""
