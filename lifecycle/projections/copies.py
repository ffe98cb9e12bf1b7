"""Records of one copy, and of the ends that vLLM waits for in one life of a request.

An end is a notification to vLLM: an asynchronous load is over (`finished_recving`), or the kept blocks of an ended
request are free (`finished_sending`).
"""

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
"""A decision to copy pages."""


class CopyKind(enum.StrEnum):
    """Direction of a copy: to the device or from it."""

    LOAD = "load"
    SAVE = "save"


class Copy(msgspec.Struct, gc=False):
    """One load or save, until it is settled and nothing about it is left to deliver.

    The job id identifies a copy; the request id does not. The request may be preempted or finished, or its id reused,
    while the copy still runs.
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

    # --- progress; `table.py` has the transitions of `work` and `source` -----------------------
    work: WorkRegion = WorkRegion.ISSUED
    source: SourceRegion = SourceRegion.OWNED
    ranks_done: tuple[Int64, ...] = ()
    """Ranks that reported the copy as done, in ascending order, as in every field with ranks."""
    ranks_failed: tuple[Int64, ...] = ()
    repeated_ranks: tuple[Int64, ...] = ()
    """Ranks in the last report that had reported the copy before and were not asked to report again."""
    error: str = ""

    # --- chunks --------------------------------------------------------------------------------
    chunks: tuple[ChunkNumber, ...] = ()
    keys: tuple[bytes, ...] = ()
    """Keys of `chunks`, as the request had them when the copy was issued."""
    earlier_keys: tuple[tuple[ChunkNumber, bytes], ...] = ()
    """(chunk, key) of the chunks before `chunks` that end in a block of the save. The saved pages contain them, too."""
    epoch: Count = 0
    """Number of cache resets before the copy was issued."""
    asked_step: Count = 0
    """Number of steps when the copy was issued, or when the workers were last asked about it."""
    asked_ns: TimeNs = 0
    is_doubtful: bool = False
    """Whether the copy is a save whose source blocks may have had wrong contents. Its chunks are not offered."""

    @property
    def is_load(self) -> bool:
        """Whether the copy is a load."""
        return self.kind is CopyKind.LOAD

    @property
    def life(self) -> tuple[str, int, int]:
        """Request id, ordinal and generation: the first fields of a decision about the copy."""
        return self.request_id, self.ordinal, self.generation


class LoadEnd(enum.StrEnum):
    """Progress of a life's asynchronous load, until vLLM gets the *end* of the load once."""

    NONE = "none"
    CLAIMED = "claimed"
    """Blocks are allocated; no load is issued yet."""
    UNDER_WAY = "under_way"
    ARRIVED = "arrived"
    """The load is complete; the connector has not reported it to vLLM yet."""
    FAILED = "failed"
    """The load failed; no worker was asked to report the failure yet."""
    WITH_WORKERS = "with_workers"
    """Workers were asked to report the failure; vLLM has not received the report yet."""


class BlocksEnd(enum.StrEnum):
    """Why vLLM keeps the blocks of an ended life."""

    NONE = "none"
    KEPT_FOR_LOAD = "kept_for_load"
    """The load is not over; its end frees the blocks."""
    KEPT_FOR_COPY = "kept_for_copy"
    """Saves still read the blocks."""
    FREE_AGAIN = "free_again"
    """No save reads the blocks any more; no worker was asked to report that yet."""
    WITH_WORKERS = "with_workers"
    """Workers were asked to report that the blocks are free; vLLM has not received the report yet."""


class OwedEnds(msgspec.Struct):
    """The ends of one life: vLLM waits for them, or will wait if it claims the tokens that an answer offered."""

    request_id: str
    is_promised: bool = False
    """Whether the last lookup was answered with an asynchronous load."""
    load: LoadEnd = LoadEnd.NONE
    load_id: JobId = 0
    """Job id of the load in flight; 0 if there is none. A second load of the life has no end of its own."""
    blocks: BlocksEnd = BlocksEnd.NONE


class Issued(msgspec.Struct):
    """A decided job that no worker has received yet."""

    sequence: Sequence
    job: PageJob


class Reminder(msgspec.Struct):
    """A reminder about a job. No worker has received the reminder yet."""

    sequence: Sequence
    awaited: e.TransferAwaited


class Channel(enum.StrEnum):
    """The recipient of pending jobs and ends."""

    WORKERS = "workers"
    VLLM = "vllm"


class Ready(msgspec.Struct, frozen=True):
    """Everything to be delivered now on one channel."""

    jobs: tuple[PageJob, ...] = ()
    """In order of issue."""
    late: tuple[PageJob, ...] = ()
    """Jobs that missed their step. Report them as failed and never hand them out."""
    awaited: tuple[e.TransferAwaited, ...] = ()
    block_ids: tuple[int, ...] = ()
    """Blocks that vLLM counts as loaded, but that no copy will fill."""
    failed: Mapping[int, str] = {}
    """Ordinal → request id, of lives whose asynchronous load failed. Each worker reports these requests to vLLM."""
    sent: Mapping[int, str] = {}
    """Ordinal → request id, of ended lives whose blocks no copy reads. Each worker reports these requests to vLLM."""
    received: Mapping[int, str] = {}
    """Ordinal → request id, of lives whose asynchronous load is complete. The connector reports these requests."""
    reported: tuple[int, ...] = ()
    """Ordinals of lives whose end vLLM has received from the workers."""


NOTHING_OWED = Ready()
"""Returned for a channel on which nothing is pending."""
