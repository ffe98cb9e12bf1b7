"""From the decisions of a step to what its workers are given: jobs in the order in which they must happen.

It knows decisions and metadata, no requests and nothing of vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvledger.adapters.vllm.deliveries import Deliveries
from kvledger.adapters.vllm.journal import Job
from kvledger.adapters.vllm.metadata import PageJob, StepJobs
from kvledger.lifecycle import events as e
from kvledger.lifecycle.windows import NO_SLOT

NO_JOBS = StepJobs()


def step_jobs(jobs: Sequence[Job], undeliverable: Sequence[int], deliveries: Deliveries) -> StepJobs:
    """What goes out with a step; takes from `deliveries` what every worker is to tell vLLM."""
    if not jobs and not undeliverable and not deliveries.is_owing:
        return NO_JOBS
    awaited = [job for job in jobs if isinstance(job, e.TransferAwaited)]
    loads = [job for job in jobs if isinstance(job, e.LoadIssued)]
    saves = [job for job in jobs if isinstance(job, e.SaveIssued) and not job.before_forward]
    hurried = [
        job
        for job in jobs
        if isinstance(job, e.TailSaveIssued) or (isinstance(job, e.SaveIssued) and job.before_forward)
    ]
    return StepJobs(
        awaited=tuple(job.job_id for job in awaited if job.before_forward),
        asked_after=tuple(job.job_id for job in awaited if not job.before_forward),
        saves_before_forward=_page_jobs(hurried),
        loads=_page_jobs(job for job in loads if not job.is_async),
        saves=_page_jobs(job for job in saves if not job.is_async),
        async_loads=_page_jobs(job for job in loads if job.is_async),
        async_saves=_page_jobs(job for job in saves if job.is_async),
        undeliverable_block_ids=tuple(undeliverable),
        failed_loads=deliveries.take_failed(),
        finished_saves=deliveries.take_sent(),
    )


def no_copies(jobs: Sequence[Job], undeliverable: Sequence[int], deliveries: Deliveries) -> StepJobs:
    """What goes out with a step for which `step_jobs` failed: copies under way are waited for, none begins.

    Blocks that a load within the step was to fill are reported with those in `undeliverable`.
    """
    awaited = [job for job in jobs if isinstance(job, e.TransferAwaited)]
    loads = [job for job in jobs if isinstance(job, e.LoadIssued) and not job.is_async]
    return StepJobs(
        awaited=tuple(job.job_id for job in awaited),
        undeliverable_block_ids=(*undeliverable, *(block_id for job in loads for block_id in job.block_ids)),
        failed_loads=deliveries.take_failed(),
        finished_saves=deliveries.take_sent(),
    )


def _page_jobs(jobs: Iterable[e.LoadIssued | e.SaveIssued | e.TailSaveIssued]) -> tuple[PageJob, ...]:
    return tuple(_page_job(job) for job in jobs)


def _page_job(job: e.LoadIssued | e.SaveIssued | e.TailSaveIssued) -> PageJob:
    if NO_SLOT not in job.slots:
        return PageJob(job.job_id, job.block_ids, job.slots)
    copied = [(block_id, slot) for block_id, slot in zip(job.block_ids, job.slots, strict=True) if slot != NO_SLOT]
    return PageJob(job.job_id, tuple(block_id for block_id, _ in copied), tuple(slot for _, slot in copied))
