"""What travels between the scheduler side and the workers: jobs one way, reports the other.

Plain values only; vLLM pickles them to worker processes.
"""

from __future__ import annotations

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@attrs.frozen(slots=False)
class PageJob:
    """Pages to copy: `block_ids[i]` and `slots[i]` belong together."""

    job_id: int
    block_ids: tuple[int, ...]
    slots: tuple[int, ...]
    pages: tuple[int, ...] = ()
    """Of each pair that is to be digested its place in the request's flat table, of each other -1; empty: none is."""


@attrs.frozen(slots=False)
class StepJobs(KVConnectorMetadata):
    """The jobs of one engine step, in the order in which they must happen, and what vLLM's scheduler is to know."""

    awaited: tuple[int, ...] = ()
    """Jobs that must be done before the forward, because it may overwrite their blocks."""
    asked_after: tuple[int, ...] = ()
    """Jobs that some rank has not reported for too long; to be reported, again if they have been."""
    saves_before_forward: tuple[PageJob, ...] = ()
    loads: tuple[PageJob, ...] = ()
    saves: tuple[PageJob, ...] = ()
    async_loads: tuple[PageJob, ...] = ()
    """To be started in this step, to be done at any time."""
    async_saves: tuple[PageJob, ...] = ()
    undeliverable_block_ids: tuple[int, ...] = ()
    """Blocks that the scheduler counts on and that will not be filled; reported as load errors."""
    failed_loads: tuple[str, ...] = ()
    """Requests whose asynchronous load failed on some rank; every rank reports them to vLLM."""
    finished_saves: tuple[str, ...] = ()
    """Finished requests out of whose blocks nobody copies any more; every rank reports them to vLLM."""
    is_idle: bool = attrs.field(default=False, eq=False)
    """Whether the step computes nothing, so that only copies can bring the engine on."""
    delivered: int = attrs.field(default=0, eq=False)
    """Sequence number of the `EffectsDelivered` that records that these jobs were handed out; 0 if none does."""

    def __bool__(self) -> bool:
        return self != _NOTHING

    @property
    def has_reports(self) -> bool:
        """Whether the output of the step has to report copies that it waits for or that were asked after, or more.

        That is ends, and blocks that no copy fills.
        """
        copies = self.saves_before_forward or self.loads or self.saves or self.asked_after
        return bool(copies or self.failed_loads or self.finished_saves or self.undeliverable_block_ids)


_NOTHING = StepJobs()


@attrs.frozen(slots=False)
class DigestedJob:
    """Digests of the pages of one job."""

    job_id: int
    pages: tuple[int, ...]
    """Place of each block in the request's flat table."""
    digests: tuple[int, ...]
    """Of these blocks: before a save, after a load."""
    stored_digests: tuple[int, ...] = ()
    """Of their slots before a load; empty for a save."""


@attrs.frozen(slots=False)
class JobReport:
    """How one rank fared with one copy."""

    job_ids: tuple[int, ...]
    """What it was for: several saves, or one job."""
    rank: int
    done: bool
    num_bytes: int
    duration_ns: int
    error: str = ""
    is_repeated: bool = False
    """Whether this was reported before, and was asked for again."""
    digested: tuple[DigestedJob, ...] = ()
    """Digests of those of its jobs that have any."""
    moments: tuple[int, ...] = ()
    """When the copy began and ended, see `CopyMoments.as_fields`."""


@attrs.frozen(slots=False)
class Ends:
    """What `get_transfer_results` returned, in vLLM's ids. Here and not with vLLM: other connectors add theirs."""

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    failed_recving: frozenset[str] = frozenset()


@attrs.frozen(slots=False)
class StepReport:
    """One rank has sent the output of a step that has something to report, see `StepJobs.has_reports`.

    Also of any other step, if the rank reports blocks as not filled.
    """

    delivered: int
    """See `StepJobs.delivered`; 0 if the step has no jobs."""
    rank: int
    under_way: tuple[int, ...] = ()
    """Jobs whose copies have begun, that the device keeps in order, and that are not over yet."""
    ends: Ends | None = None
    """What the rank gave vLLM with that output; None if that is not known."""
    unfilled: frozenset[int] | None = None
    """Blocks that the rank reported to vLLM as not filled with that output; None if that is not known.

    Here and not with vLLM, which merges the blocks of all ranks and of other connectors.
    """


@attrs.frozen(slots=False)
class WorkerStart(KVConnectorHandshakeMetadata):
    """What one rank has when it has started, for the scheduler side to compare with what it counts on."""

    rank: int
    num_slots: int
    slot_bytes: int
    """What a copy of one block moves on this rank."""
    copies_async: bool
    """Whether it can copy while steps run."""
    declined: tuple[str, ...] = ()
    """Why this rank copies nothing at all; empty where it does."""


@attrs.frozen(slots=False)
class WorkerReports(KVConnectorWorkerMetadata):
    """The reports of one step, of one rank or, aggregated, of all."""

    reports: tuple[JobReport, ...]
    starts: tuple[WorkerStart, ...] = ()
    """In the first step, where nobody asked for it at start."""
    steps: tuple[StepReport, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReports:
        """Put the reports of several ranks together; each names its rank."""
        if not isinstance(other, WorkerReports):
            return self
        return WorkerReports(self.reports + other.reports, self.starts + other.starts, self.steps + other.steps)
