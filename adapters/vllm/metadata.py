"""What the scheduler side and the workers exchange: jobs go to the workers, and reports come back.

The classes hold plain values, because vLLM pickles them to send them to other processes. The functions make the jobs of
a step from the pending decisions, and observations from the workers' reports.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise

import attrs
import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvledger.lifecycle import LedgerConfiguration, Projections, Ready
from kvledger.lifecycle import PageJob as IssuedJob
from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT

_REMEDY = (
    "start all processes of the engine with the same versions of kvledger and vLLM and the same "
    "kv_connector_extra_config (host_bytes counts all ranks together); if they are the same, this is a bug of "
    "kvledger: report this message with the log"
)


class PageJob(msgspec.Struct, frozen=True):
    """Pages to copy, each between the block `block_ids[i]` and the slot `slots[i]`."""

    job_id: int
    block_ids: tuple[int, ...]
    slots: tuple[int, ...]
    pages: tuple[int, ...] = ()
    """For each block, its place in the request's flat table (`versions.flat_table`) if the block is digested, else -1.
    Empty if no block of the job is digested."""


class _MetadataMeta(msgspec.StructMeta, ABCMeta):
    """Metaclass of structs that are a connector's metadata."""


class StepJobs(KVConnectorMetadata, msgspec.Struct, frozen=True, metaclass=_MetadataMeta):
    """The jobs of one engine step, in the order in which they must run, and ends for the workers to report to vLLM."""

    awaited: tuple[int, ...] = ()
    """Jobs whose copies must be over before the forward, because the forward may overwrite their blocks."""
    asked_after: tuple[int, ...] = ()
    """Jobs that some rank has not reported in time. All workers report these jobs, even if they did so before."""
    saves_before_forward: tuple[PageJob, ...] = ()
    loads: tuple[PageJob, ...] = ()
    saves: tuple[PageJob, ...] = ()
    async_loads: tuple[PageJob, ...] = ()
    """Loads that begin in this step and may end in this or any later step."""
    async_saves: tuple[PageJob, ...] = ()
    undeliverable_block_ids: tuple[int, ...] = ()
    """Blocks that vLLM expects to be loaded, but that no copy fills. The workers report them to vLLM as load errors."""
    failed_loads: tuple[str, ...] = ()
    """Requests whose asynchronous load failed on some rank; every rank reports these requests to vLLM."""
    finished_saves: tuple[str, ...] = ()
    """Finished requests whose blocks no copy reads any more; every rank reports these requests to vLLM."""
    is_idle: bool = False
    """Whether the step computes nothing, so that only copies make progress."""
    delivered: int = 0
    """Sequence number of the `EffectsDelivered` that records that these jobs went out; 0 if there is no such event."""

    def __bool__(self) -> bool:
        begun = self.saves_before_forward or self.loads or self.saves or self.async_loads or self.async_saves
        return bool(begun or self.awaited or self.has_reports)

    @property
    def has_reports(self) -> bool:
        """Whether the step's output must report copies, ends, or blocks that no copy fills.

        That output must report a copy only if the step waits for the copy or the workers are asked about the copy.
        """
        copies = self.saves_before_forward or self.loads or self.saves or self.asked_after
        return bool(copies or self.failed_loads or self.finished_saves or self.undeliverable_block_ids)


NO_JOBS = StepJobs()


@attrs.frozen(slots=False)
class DigestedJob:
    """Digests of the pages of one job."""

    job_id: int
    pages: tuple[int, ...]
    """Place of each digested block in the request's flat table (`versions.flat_table`)."""
    digests: tuple[int, ...]
    """Digest of each block of `pages`: before a save reads it, or after a load has filled it."""
    stored_digests: tuple[int, ...] = ()
    """Digest of the slot of each block of `pages`, before a load reads the slot; empty for a save."""


@attrs.frozen(slots=False)
class JobReport:
    """The result of one copy on one rank."""

    job_ids: tuple[int, ...]
    """The jobs of the copy: one job, or several saves that were copied together."""
    rank: int
    done: bool
    num_bytes: int
    duration_ns: int
    error: str = ""
    is_repeated: bool = False
    """Whether this repeats an earlier report, because the scheduler side asked for it."""
    digested: tuple[DigestedJob, ...] = ()
    """Digests of the jobs whose pages were digested."""
    moments: tuple[int, ...] = ()
    """When the copy began and ended, see `CopyMoments.as_fields`."""


@attrs.frozen(slots=False)
class Ends:
    """The ends that `get_transfer_results` returned, as vLLM's request ids, without the ends of other connectors."""

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    failed_recving: frozenset[str] = frozenset()


@attrs.frozen(slots=False)
class StepReport:
    """A rank's message that it has sent the output of a step.

    A rank sends one for each step that must report something (`StepJobs.has_reports`), and for each step in which the
    rank reports blocks as not filled.
    """

    delivered: int
    """See `StepJobs.delivered`; 0 if the step has no jobs."""
    rank: int
    under_way: tuple[int, ...] = ()
    """Jobs whose copies have begun and not ended, and which the device finishes before any new work."""
    ends: Ends | None = None
    """Ends that the rank reported to vLLM with that output; None if they are unknown."""
    unfilled: frozenset[int] | None = None
    """Blocks that the rank reported to vLLM in that output as not filled; None if they are unknown.

    vLLM itself merges these with the blocks of the other ranks and connectors.
    """


@attrs.frozen(slots=False)
class WorkerStart(KVConnectorHandshakeMetadata):
    """Description of one rank's host pool at start, for comparison with what the scheduler side expects."""

    rank: int
    num_slots: int
    slot_bytes: int
    """Bytes of one slot. A copy of one block moves this many bytes on this rank."""
    copies_async: bool
    """Whether the rank can copy while steps run."""
    declined: tuple[str, ...] = ()
    """Reasons why this rank copies nothing; empty if the rank makes copies."""

    def disagreement(self, configuration: LedgerConfiguration) -> str:
        """Return which expectation of the scheduler side this rank does not meet; empty if it meets all of them."""
        if self.num_slots != configuration.num_slots:
            return (
                f"rank {self.rank} has a host pool of {self.num_slots} slots ({self.slot_bytes} bytes each), the "
                f"scheduler expects {configuration.num_slots}"
            )
        if configuration.copies_async and not self.copies_async:
            return f"rank {self.rank} cannot copy while steps run, but the scheduler expects it to"
        return ""


@attrs.frozen(slots=False)
class WorkerReports(KVConnectorWorkerMetadata):
    """The reports of one rank in one step, or of all ranks after `aggregate`."""

    reports: tuple[JobReport, ...]
    starts: tuple[WorkerStart, ...] = ()
    """Descriptions of the ranks' host pools. Sent in the first step, if vLLM did not ask for them at start."""
    steps: tuple[StepReport, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReports:
        """Join the reports of several ranks. Each report names its rank."""
        if not isinstance(other, WorkerReports):
            return self
        return WorkerReports(self.reports + other.reports, self.starts + other.starts, self.steps + other.steps)


def disagreements(starts: Iterable[WorkerStart], configuration: LedgerConfiguration) -> str:
    """Return which expectations of the scheduler side these ranks do not meet, and the remedy; empty if none."""
    found = "; ".join(filter(None, (start.disagreement(configuration) for start in starts)))
    return f"{found}; {_REMEDY}" if found else ""


# --- from what is pending to the workers' jobs, in the order in which they must happen -----------------------------


def step_jobs(ready: Ready, pages_of: Callable[[IssuedJob], tuple[int, ...]] | None = None) -> StepJobs:
    """Return the `StepJobs` that go to the workers with a step.

    `pages_of` returns which pages of a job are digested. If it is None, no pages are digested.
    """
    jobs: dict[str, list[PageJob]] = {}
    for job in ready.jobs:
        jobs.setdefault(_list_of(job), []).append(_page_job(job, () if pages_of is None else pages_of(job)))
    return StepJobs(
        awaited=tuple([awaited.job_id for awaited in ready.awaited if awaited.before_forward]),
        asked_after=tuple([awaited.job_id for awaited in ready.awaited if not awaited.before_forward]),
        saves_before_forward=tuple(jobs.get("saves_before_forward", ())),
        loads=tuple(jobs.get("loads", ())),
        saves=tuple(jobs.get("saves", ())),
        async_loads=tuple(jobs.get("async_loads", ())),
        async_saves=tuple(jobs.get("async_saves", ())),
        undeliverable_block_ids=ready.block_ids,
        failed_loads=tuple(ready.failed.values()),
        finished_saves=tuple(ready.sent.values()),
    )


def _list_of(job: IssuedJob) -> str:
    """Return the name of the list in `StepJobs` that the job belongs to."""
    if isinstance(job, e.LoadIssued):
        return "async_loads" if job.is_async else "loads"
    if isinstance(job, e.TailSaveIssued) or job.before_forward:
        return "saves_before_forward"
    return "async_saves" if job.is_async else "saves"


def no_copies(ready: Ready) -> StepJobs:
    """Return the `StepJobs` that go to the workers with a step if `step_jobs` failed.

    The step begins no copies. It waits for each copy of which `ready` has a reminder, and reports ends and unfilled
    blocks.
    """
    return StepJobs(
        awaited=tuple(awaited.job_id for awaited in ready.awaited),
        undeliverable_block_ids=ready.block_ids,
        failed_loads=tuple(ready.failed.values()),
        finished_saves=tuple(ready.sent.values()),
    )


def _page_job(job: IssuedJob, pages: tuple[int, ...]) -> PageJob:
    if NO_SLOT not in job.slots:
        return PageJob(job.job_id, job.block_ids, job.slots, pages)
    copied = [(block_id, slot) for block_id, slot in zip(job.block_ids, job.slots, strict=True) if slot != NO_SLOT]
    return PageJob(job.job_id, tuple(block_id for block_id, _ in copied), tuple(slot for _, slot in copied), pages)


# --- from what the workers report to observations -----------------------------------------------------------------


def reported_transfers(
    arrived: Iterable[JobReport], projections: Projections, now: Callable[[], int]
) -> Iterator[e.TransferReported]:
    """Yield one observation for each copy, which names all ranks that reported the copy.

    Record each observation before you take the next one, which depends on `projections`.
    """
    by_copy: dict[tuple[tuple[int, ...], bool, tuple[int, ...]], dict[int, JobReport]] = {}
    for report in arrived:
        copied = (report.job_ids, report.is_repeated, report.moments)
        by_copy.setdefault(copied, {}).setdefault(report.rank, report)
    for (job_ids, is_repeated, moments), by_rank in by_copy.items():
        reports = by_rank.values()
        yield e.TransferReported(
            job_ids=job_ids,
            ranks_done=tuple(sorted(report.rank for report in reports if report.done)),
            ranks_failed=tuple(sorted(report.rank for report in reports if not report.done)),
            is_repeated=is_repeated,
            num_bytes=_bytes_of(job_ids, sum(report.num_bytes for report in reports), projections),
            duration_ns=max(report.duration_ns for report in reports),
            error=next((report.error for report in reports if report.error), ""),
            withheld="",
            time_ns=now(),
            moments=moments,
        )


def _bytes_of(job_ids: tuple[int, ...], num_bytes: int, projections: Projections) -> tuple[int, ...]:
    """Return the bytes that a copy moved for each of its jobs: `num_bytes`, divided in proportion to the jobs' pages.

    The results add up to `num_bytes`. Ranks that share a pool each write only a part of the pages, so a job's bytes
    need not be a multiple of a page.
    """
    if len(job_ids) == 1:
        return (num_bytes,)
    jobs = map(projections.jobs.get, job_ids)
    ends = list(accumulate(0 if job is None else len(job.slots) - job.slots.count(NO_SLOT) for job in jobs))
    num_pages = ends[-1] or 1
    return tuple([num_bytes * end // num_pages - num_bytes * first // num_pages for first, end in pairwise([0, *ends])])


def reported_steps(arrived: Iterable[StepReport]) -> Iterator[e.StepReported]:
    """Yield observations that ranks have sent the output of a step. Leaves out steps without jobs.

    Each observation names the ranks, and the copies that were still in flight on all of these ranks.
    """
    ranks: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for step in arrived:
        if step.delivered:  # else the step has no `EffectsDelivered`, so no jobs can be missing
            ranks.setdefault((step.delivered, step.under_way), []).append(step.rank)
    for (delivered, under_way), of_ranks in ranks.items():
        yield e.StepReported(delivered, tuple(sorted(of_ranks)), under_way)
