"""What travels between the scheduler side and the workers: jobs one way, reports the other.

Plain values only; vLLM pickles them to worker processes.
"""

from __future__ import annotations

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@attrs.frozen(slots=False)
class PageJob:
    """Pages to copy: `block_ids[i]` and `slots[i]` belong together."""

    job_id: int
    block_ids: tuple[int, ...]
    slots: tuple[int, ...]


@attrs.frozen(slots=False)
class StepJobs(KVConnectorMetadata):
    """The jobs of one engine step, in the order in which they must happen."""

    saves_before_forward: tuple[PageJob, ...] = ()
    loads: tuple[PageJob, ...] = ()
    saves: tuple[PageJob, ...] = ()
    undeliverable_block_ids: tuple[int, ...] = ()
    """Blocks that the scheduler believes will be filled and that will not be; reported as load errors."""

    def __bool__(self) -> bool:
        return bool(self.saves_before_forward or self.loads or self.saves or self.undeliverable_block_ids)


@attrs.frozen(slots=False)
class JobReport:
    """How one rank fared with one job."""

    job_id: int
    rank: int
    done: bool
    num_bytes: int
    duration_ns: int
    error: str = ""


@attrs.frozen(slots=False)
class WorkerReports(KVConnectorWorkerMetadata):
    """The reports of one step, of one rank or, aggregated, of all."""

    reports: tuple[JobReport, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReports:
        """Put the reports of several ranks together; the scheduler side counts them."""
        if not isinstance(other, WorkerReports):
            return self
        return WorkerReports(self.reports + other.reports)
