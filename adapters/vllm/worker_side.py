"""The worker's half: copies pages when it is told to, and reports every job exactly once.

It knows blocks and slots, no requests. A copy that fails is reported as failed; the scheduler's side decides
what that means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvledger.adapters.vllm import versions
from kvledger.adapters.vllm.messages import messages
from kvledger.adapters.vllm.metadata import JobReport, PageJob, StepJobs, WorkerReports
from kvledger.storage.kv import CopyEngine, CopyResult, HostPool, describe_blocks, make_copy_engine

if TYPE_CHECKING:
    import torch


class WorkerSide:
    """Owns the host pool and the copy engine of one rank."""

    def __init__(self, *, num_slots: int, num_blocks: int, rank: int = 0) -> None:
        self._rank = rank
        self._num_slots = num_slots
        self._num_blocks = num_blocks
        self._pool: HostPool | None = None
        self._engine: CopyEngine | None = None
        self._step: StepJobs | None = None
        self._executed: set[int] = set()
        self._reports: list[JobReport] = []
        self._failed_block_ids: set[int] = set()
        self._messages = messages.bind()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Describe where every block's pages lie and allocate the pool. Called once, at start; may raise."""
        tensors = versions.registered_tensors(dict(kv_caches))
        dimensions = {name: versions.block_dimension(t.shape, self._num_blocks) for name, t in tensors.items()}
        layout = describe_blocks(
            tensors,
            num_blocks=self._num_blocks,
            block_dims={name: dimension for name, dimension in dimensions.items() if dimension is not None},
        )
        is_cuda = any(tensor.is_cuda for tensor in tensors.values())
        self._pool = HostPool(self._num_slots, layout.block_bytes, pin=is_cuda)
        self._engine = make_copy_engine(layout, self._pool)
        self._messages.info(
            "host pool ready",
            num_slots=self._num_slots,
            block_bytes=layout.block_bytes,
            host_bytes=self._num_slots * layout.block_bytes,
            pinned=self._pool.is_pinned,
            num_layers=len(layout.layers),
        )

    def before_forward(self, jobs: StepJobs) -> None:
        """Copy out what the step may overwrite (`handle_preemptions`). A second call does nothing."""
        self._begin(jobs)
        for job in jobs.saves_before_forward:
            self._save(job)

    def load(self, jobs: StepJobs) -> None:
        """Copy in what the forward needs (`start_load_kv`)."""
        self._begin(jobs)
        for job in jobs.saves_before_forward:  # in case no hook came before
            self._save(job)
        for job in jobs.loads:
            self._load(job)

    def save(self, jobs: StepJobs) -> None:
        """Copy out what has settled (`wait_for_save`), after everything that had to precede."""
        self.load(jobs)
        for job in jobs.saves:
            self._save(job)

    def take_failed_block_ids(self) -> set[int]:
        """Blocks that were promised and are not filled."""
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def take_reports(self) -> WorkerReports | None:
        """The reports since the last call; None where there are none."""
        if not self._reports:
            return None
        reports, self._reports = self._reports, []
        return WorkerReports(tuple(reports))

    def close(self) -> None:
        """Free the pool. May be called twice."""
        if self._engine is not None:
            self._engine.close()
        if self._pool is not None:
            self._pool.close()
        self._engine = self._pool = None

    def _begin(self, jobs: StepJobs) -> None:
        if jobs is not self._step:
            self._step = jobs
            self._executed.clear()
            self._failed_block_ids.update(jobs.undeliverable_block_ids)

    def _save(self, job: PageJob) -> None:
        if self._is_first(job):
            self._report(job, lambda engine: engine.save(job.block_ids, job.slots))

    def _load(self, job: PageJob) -> None:
        if self._is_first(job) and not self._report(job, lambda engine: engine.load(job.slots, job.block_ids)):
            self._failed_block_ids.update(job.block_ids)

    def _is_first(self, job: PageJob) -> bool:
        if job.job_id in self._executed:
            return False
        self._executed.add(job.job_id)
        return True

    def _report(self, job: PageJob, copy: _Copy) -> bool:
        try:
            if self._engine is None:
                message = "no KV caches were registered"
                raise RuntimeError(message)  # noqa: TRY301 -- reported like any other failure
            result = copy(self._engine)
        except Exception as error:  # noqa: BLE001 -- a failed copy costs its request the cache, not the worker its life
            described = f"{type(error).__name__}: {error}"
            self._messages.error("copy failed", job_id=job.job_id, error=described)
            failed = JobReport(job.job_id, self._rank, done=False, num_bytes=0, duration_ns=0, error=described)
            self._reports.append(failed)
            return False
        num_bytes, duration_ns = result.num_bytes, result.duration_ns
        self._reports.append(JobReport(job.job_id, self._rank, done=True, num_bytes=num_bytes, duration_ns=duration_ns))
        return True


if TYPE_CHECKING:
    from collections.abc import Callable

    _Copy = Callable[[CopyEngine], CopyResult]
