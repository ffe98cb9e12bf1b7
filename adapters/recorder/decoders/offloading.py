"""OffloadingConnector: jobs with the blocks of each group (`kv_connector/v1/offloading/common.py`, vLLM 0.32)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvledger.adapters.recorded.payloads import JOB, Transferred


def copies(metadata: Any, _block_size: int) -> Iterator[tuple[str, Transferred]]:
    """Yield one copy for each job and each group in which the job has blocks."""
    yield from _of(metadata.load_jobs, is_load=True)
    yield from _of(metadata.store_jobs, is_load=False)


def _of(jobs: Mapping[int, Any], *, is_load: bool) -> Iterator[tuple[str, Transferred]]:
    for job_id, job in jobs.items():
        spec = job.dst_spec if is_load else job.src_spec  # `GPULoadStoreSpec` joins the groups' blocks
        first = 0
        for group, (size, index) in enumerate(zip(spec.group_sizes, spec.block_indices, strict=True)):
            block_ids = tuple(int(block) for block in spec.block_ids[first : first + size])
            first += size
            if block_ids:
                yield job.req_id, Transferred(str(job_id), is_load, group, int(index), block_ids, JOB, is_whole=True)


def awaited(metadata: Any) -> Iterator[str]:
    """Yield the jobs that workers must finish before the step computes anything (`worker.py`, handle_preemptions)."""
    yield from map(str, sorted(metadata.jobs_to_flush or ()))


def completed(worker_metadata: Any) -> Iterator[tuple[str, int]]:
    """Yield (job, number of workers that have done the job)."""
    yield from ((str(job_id), count) for job_id, count in worker_metadata.completed_jobs.items())
