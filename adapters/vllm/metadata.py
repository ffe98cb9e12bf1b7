"""What the scheduler side and the workers exchange: jobs one way, reports the other.

Plain values, because vLLM pickles them to worker processes. The functions make the jobs of a step from what is pending,
and observations from the workers' reports.
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
    """Pages to copy: `block_ids[i]` and `slots[i]` belong together."""

    job_id: int
    block_ids: tuple[int, ...]
    slots: tuple[int, ...]
    pages: tuple[int, ...] = ()
    """Place of each pair in the request's flat table, -1 if the pair is not digested; empty: none is digested."""


class _MetadataMeta(msgspec.StructMeta, ABCMeta):
    """Metaclass of structs that are a connector's metadata."""


class StepJobs(KVConnectorMetadata, msgspec.Struct, frozen=True, metaclass=_MetadataMeta):
    """The jobs of one engine step, in the order in which they must happen, and reports for vLLM's scheduler."""

    awaited: tuple[int, ...] = ()
    """Jobs whose copies must be over before the forward, because the forward may overwrite their blocks."""
    asked_after: tuple[int, ...] = ()
    """Jobs that some rank has not reported for too long. The workers report them, if necessary again."""
    saves_before_forward: tuple[PageJob, ...] = ()
    loads: tuple[PageJob, ...] = ()
    saves: tuple[PageJob, ...] = ()
    async_loads: tuple[PageJob, ...] = ()
    """Loads that begin in this step and may end at any time."""
    async_saves: tuple[PageJob, ...] = ()
    undeliverable_block_ids: tuple[int, ...] = ()
    """Blocks that the scheduler counts on and that no copy fills; reported as load errors."""
    failed_loads: tuple[str, ...] = ()
    """Requests whose asynchronous load failed on some rank; every rank reports these requests to vLLM."""
    finished_saves: tuple[str, ...] = ()
    """Finished requests whose blocks no copy reads any more; every rank reports these requests to vLLM."""
    is_idle: bool = False
    """Whether the step computes nothing, so that only copies make progress."""
    delivered: int = 0
    """Sequence number of the `EffectsDelivered` that records the hand-out of these jobs; 0 if none does."""

    def __bool__(self) -> bool:
        begun = self.saves_before_forward or self.loads or self.saves or self.async_loads or self.async_saves
        return bool(begun or self.awaited or self.has_reports)

    @property
    def has_reports(self) -> bool:
        """Whether the step's output must report copies, ends, or blocks that no copy fills.

        The copies are those that the step waits for or asks about.
        """
        copies = self.saves_before_forward or self.loads or self.saves or self.asked_after
        return bool(copies or self.failed_loads or self.finished_saves or self.undeliverable_block_ids)


NO_JOBS = StepJobs()


@attrs.frozen(slots=False)
class DigestedJob:
    """Digests of the pages of one job."""

    job_id: int
    pages: tuple[int, ...]
    """Place of each block in the request's flat table."""
    digests: tuple[int, ...]
    """Digests of these blocks, before a save or after a load."""
    stored_digests: tuple[int, ...] = ()
    """Digests of the slots of these blocks, before a load; empty for a save."""


@attrs.frozen(slots=False)
class JobReport:
    """The result of one copy on one rank."""

    job_ids: tuple[int, ...]
    """The jobs of the copy: several saves, or one job."""
    rank: int
    done: bool
    num_bytes: int
    duration_ns: int
    error: str = ""
    is_repeated: bool = False
    """Whether this was reported before and was asked for again."""
    digested: tuple[DigestedJob, ...] = ()
    """Digests of the jobs that have any."""
    moments: tuple[int, ...] = ()
    """When the copy began and ended, see `CopyMoments.as_fields`."""


@attrs.frozen(slots=False)
class Ends:
    """What `get_transfer_results` returned, in vLLM's ids. vLLM itself merges in the ends of other connectors."""

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    failed_recving: frozenset[str] = frozenset()


@attrs.frozen(slots=False)
class StepReport:
    """A rank has sent the output of a step that must report something (see `StepJobs.has_reports`).

    A rank also sends this for any other step in which it reports blocks as not filled.
    """

    delivered: int
    """See `StepJobs.delivered`; 0 if the step has no jobs."""
    rank: int
    under_way: tuple[int, ...] = ()
    """Jobs whose copies have begun, are ordered by the device, and are not over."""
    ends: Ends | None = None
    """What the rank gave vLLM with that output; None if unknown."""
    unfilled: frozenset[int] | None = None
    """Blocks that the rank reported to vLLM as not filled with that output; None if unknown.

    vLLM itself merges the blocks of all ranks and of other connectors.
    """


@attrs.frozen(slots=False)
class WorkerStart(KVConnectorHandshakeMetadata):
    """What one rank has at start, to compare with what the scheduler side expects."""

    rank: int
    num_slots: int
    slot_bytes: int
    """Bytes that a copy of one block moves on this rank."""
    copies_async: bool
    """Whether the rank can copy while steps run."""
    declined: tuple[str, ...] = ()
    """Why this rank copies nothing; empty if it copies."""

    def disagreement(self, configuration: LedgerConfiguration) -> str:
        """Return what the scheduler side expects and this rank lacks; empty if it lacks nothing."""
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
    """The reports of one step, of one rank or, aggregated, of all."""

    reports: tuple[JobReport, ...]
    starts: tuple[WorkerStart, ...] = ()
    """Set in the first step, if vLLM did not ask for it at start."""
    steps: tuple[StepReport, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReports:
        """Join the reports of several ranks; each names its rank."""
        if not isinstance(other, WorkerReports):
            return self
        return WorkerReports(self.reports + other.reports, self.starts + other.starts, self.steps + other.steps)


def disagreements(starts: Iterable[WorkerStart], configuration: LedgerConfiguration) -> str:
    """Return what these ranks lack of what the scheduler side expects, with the remedy; empty if nothing."""
    found = "; ".join(filter(None, (start.disagreement(configuration) for start in starts)))
    return f"{found}; {_REMEDY}" if found else ""


# --- from what is pending to the workers' jobs, in the order in which they must happen -----------------------------


def step_jobs(ready: Ready, pages_of: Callable[[IssuedJob], tuple[int, ...]] | None = None) -> StepJobs:
    """Return what goes out with a step; `pages_of` returns the pages of a job to digest, None: no job has any."""
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
    """The list of `StepJobs` for the job."""
    if isinstance(job, e.LoadIssued):
        return "async_loads" if job.is_async else "loads"
    if isinstance(job, e.TailSaveIssued) or job.before_forward:
        return "saves_before_forward"
    return "async_saves" if job.is_async else "saves"


def no_copies(ready: Ready) -> StepJobs:
    """Return what goes out with a step if `step_jobs` failed: the step waits for copies in flight and begins none."""
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
    """Yield one observation for each copy, with all ranks that reported it. Record it before you take the next."""
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
    """Bytes that a copy moved for each of its jobs, by their pages; the sum is exact.

    Ranks that share a pool each write a part of the pages, so a copy may move less than whole pages for a job.
    """
    if len(job_ids) == 1:
        return (num_bytes,)
    jobs = map(projections.jobs.get, job_ids)
    ends = list(accumulate(0 if job is None else len(job.slots) - job.slots.count(NO_SLOT) for job in jobs))
    num_pages = ends[-1] or 1
    return tuple([num_bytes * end // num_pages - num_bytes * first // num_pages for first, end in pairwise([0, *ends])])


def reported_steps(arrived: Iterable[StepReport]) -> Iterator[e.StepReported]:
    """Yield one observation for each step with jobs whose output ranks have sent, with the copies still in flight."""
    ranks: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for step in arrived:
        if step.delivered:  # else the step has no `EffectsDelivered`, so no jobs can be missing
            ranks.setdefault((step.delivered, step.under_way), []).append(step.rank)
    for (delivered, under_way), of_ranks in ranks.items():
        yield e.StepReported(delivered, tuple(sorted(of_ranks)), under_way)
