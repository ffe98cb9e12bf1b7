"""From what the workers are owed to what they are given with a step: jobs in the order in which they must happen.

It knows decisions and metadata, no requests and nothing of vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvledger.adapters.vllm.metadata import PageJob, StepJobs
from kvledger.lifecycle import PageJob as Issued
from kvledger.lifecycle import Ready
from kvledger.lifecycle import events as e
from kvledger.lifecycle.windows import NO_SLOT

NO_JOBS = StepJobs()


def step_jobs(ready: Ready, pages_of: Callable[[Issued], tuple[int, ...]]) -> StepJobs:
    """What goes out with a step; `pages_of` says which pages of a job are digested."""
    if not any(ready):
        return NO_JOBS

    def page_jobs(jobs: Iterable[Issued]) -> tuple[PageJob, ...]:
        return tuple(_page_job(job, pages_of(job)) for job in jobs)

    loads = [job for job in ready.jobs if isinstance(job, e.LoadIssued)]
    saves = [job for job in ready.jobs if isinstance(job, e.SaveIssued) and not job.before_forward]
    hurried = [
        job
        for job in ready.jobs
        if isinstance(job, e.TailSaveIssued) or (isinstance(job, e.SaveIssued) and job.before_forward)
    ]
    return StepJobs(
        awaited=tuple(awaited.job_id for awaited in ready.awaited if awaited.before_forward),
        asked_after=tuple(awaited.job_id for awaited in ready.awaited if not awaited.before_forward),
        saves_before_forward=page_jobs(hurried),
        loads=page_jobs(job for job in loads if not job.is_async),
        saves=page_jobs(job for job in saves if not job.is_async),
        async_loads=page_jobs(job for job in loads if job.is_async),
        async_saves=page_jobs(job for job in saves if job.is_async),
        undeliverable_block_ids=ready.block_ids,
        failed_loads=tuple(ready.failed.values()),
        finished_saves=tuple(ready.sent.values()),
    )


def no_copies(ready: Ready) -> StepJobs:
    """What goes out with a step for which `step_jobs` failed: copies under way are waited for, none begins."""
    return StepJobs(
        awaited=tuple(awaited.job_id for awaited in ready.awaited),
        undeliverable_block_ids=ready.block_ids,
        failed_loads=tuple(ready.failed.values()),
        finished_saves=tuple(ready.sent.values()),
    )


def _page_job(job: Issued, pages: tuple[int, ...]) -> PageJob:
    if NO_SLOT not in job.slots:
        return PageJob(job.job_id, job.block_ids, job.slots, pages)
    copied = [(block_id, slot) for block_id, slot in zip(job.block_ids, job.slots, strict=True) if slot != NO_SLOT]
    return PageJob(job.job_id, tuple(block_id for block_id, _ in copied), tuple(slot for _, slot in copied), pages)
