"""Compares the loads that failed on each rank with the blocks that this rank reports to vLLM as not filled.

Like `edge.py`, which uses it, this module decides nothing and uses no code that answers the hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import attrs

from kvledger.adapters.vllm.metadata import JobReport, StepJobs, StepReport
from kvledger.lifecycle.events import Difference


@attrs.frozen
class _Reported:
    """Which blocks of one load a rank reported to vLLM as not filled."""

    missing: frozenset[int]
    """Blocks of the load that the rank did not report as not filled."""
    extra: frozenset[int]
    """Blocks of the load that the rank reported as not filled, except `StepJobs.undeliverable_block_ids`."""


class UnfilledBlocks:
    """The blocks that each rank has reported as not filled, for loads in flight that a step waits for.

    A rank reports such a block one time, with the output of the load's step. The rank's report of the load itself may
    arrive later. vLLM merges the blocks of all ranks and of all children of `MultiConnector`, so each rank lists its
    own blocks in its `StepReport`. A rank without this list is not checked.
    """

    def __init__(self, differ: Callable[[Difference, int, str], None]) -> None:
        self._differ = differ
        """Called with each difference: its kind, the block, and what differs."""
        self._handed_out: dict[int, StepJobs] = {}
        """`StepJobs.delivered` → jobs of a step that waits for loads or has blocks that no copy fills."""
        self._reported: dict[int, dict[int, _Reported]] = {}
        """Job id of a load in flight → rank → what the rank reported."""

    def handed_out(self, jobs: StepJobs) -> None:
        """Keep the jobs of a step that waits for loads or has blocks that no copy fills."""
        self._handed_out[jobs.delivered] = jobs

    def settled(self, job_id: int) -> None:
        """Forget what ranks reported about this settled job."""
        self._reported.pop(job_id, None)

    def compare(self, steps: Collection[StepReport], reports: Collection[JobReport]) -> None:
        """Compare the unfilled blocks in one output of the workers with the jobs and with the reports of copies."""
        for step in steps:
            if step.unfilled is not None:
                self._compare_step(step.delivered, step.rank, step.unfilled)
        if self._reported:
            for report in reports:
                self._compare_report(report)

    def _compare_step(self, delivered: int, rank: int, unfilled: frozenset[int]) -> None:
        for earlier in [earlier for earlier in self._handed_out if earlier < delivered]:
            del self._handed_out[earlier]
        jobs = self._handed_out.get(delivered, StepJobs())
        undeliverable = frozenset(jobs.undeliverable_block_ids)
        unexplained = unfilled - undeliverable
        for job in jobs.loads:
            block_ids = frozenset(job.block_ids)
            reported = _Reported(missing=block_ids - unfilled, extra=block_ids & unfilled - undeliverable)
            self._reported.setdefault(job.job_id, {})[rank] = reported
            unexplained -= block_ids
        self._differ_in(undeliverable - unfilled, f"rank {rank} had to report it as not filled, but did not")
        what = f"rank {rank} reported it as not filled, but no load of that step was to fill it"
        self._differ_in(unexplained, what)

    def _compare_report(self, report: JobReport) -> None:
        for job_id in () if report.is_repeated else report.job_ids:
            reported = self._reported.get(job_id, {}).pop(report.rank, None)
            if reported is not None and report.done:
                what = f"rank {report.rank} reported it as not filled, but its load as done"
                self._differ_in(reported.extra, what)
            elif reported is not None:
                what = f"rank {report.rank} neither filled it nor reported it as not filled"
                self._differ_in(reported.missing, what)

    def _differ_in(self, block_ids: frozenset[int], what: str) -> None:
        for block_id in sorted(block_ids):
            self._differ(Difference.LOAD_ERROR, block_id, what)
