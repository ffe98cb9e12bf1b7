"""From what the workers are owed to what they are given with a step: jobs in the order in which they must happen.

It knows decisions and metadata, no requests and nothing of vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable

from kvledger.adapters.vllm.metadata import PageJob, StepJobs
from kvledger.lifecycle import PageJob as Issued
from kvledger.lifecycle import Ready
from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT

NO_JOBS = StepJobs()


def step_jobs(ready: Ready, pages_of: Callable[[Issued], tuple[int, ...]]) -> StepJobs:
    """What goes out with a step; `pages_of` says which pages of a job are digested."""
    jobs: dict[str, list[PageJob]] = {}
    for job in ready.jobs:
        jobs.setdefault(_list_of(job), []).append(_page_job(job, pages_of(job)))
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


def _list_of(job: Issued) -> str:
    """In which list of `StepJobs` it goes out."""
    if isinstance(job, e.LoadIssued):
        return "async_loads" if job.is_async else "loads"
    if isinstance(job, e.TailSaveIssued) or job.before_forward:
        return "saves_before_forward"
    return "async_saves" if job.is_async else "saves"


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
