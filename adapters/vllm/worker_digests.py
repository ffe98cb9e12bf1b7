"""Computes digests on a worker: of blocks before a save, of slots before a load, and of blocks after the load.

A digest is a hash of a page's bytes. If it cannot be computed, it is left out, and the copy goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import attrs

from kvledger.adapters.vllm.messages import messages
from kvledger.adapters.vllm.metadata import DigestedJob, JobReport, PageJob
from kvledger.lifecycle import described, raise_if_unstoppable

if TYPE_CHECKING:
    import torch

    from kvledger.storage.kv import PageDigests

_Numbers = tuple[int, ...]


@attrs.define
class _Found:
    """The digests of one job. They stay on the device that computed them until they are reported."""

    pages: _Numbers
    block_ids: _Numbers
    digests: torch.Tensor | None = None
    stored: torch.Tensor | None = None


class WorkerDigests:
    """Keeps the digests of each job of one rank, from the job's start to its report."""

    def __init__(self, digests: PageDigests) -> None:
        self._digests = digests
        self._found: dict[int, _Found] = {}

    def before_save(self, job: PageJob) -> None:
        """Digest the blocks that the save is about to read."""
        self._make(job, lambda pages, block_ids, _: _Found(pages, block_ids, self._digests.of_blocks(block_ids)))

    def before_load(self, job: PageJob) -> None:
        """Digest the slots that the load is about to read."""
        self._make(job, lambda pages, block_ids, slots: _Found(pages, block_ids, None, self._digests.of_slots(slots)))

    def after_load(self, job_id: int) -> None:
        """Digest the blocks that the load has filled, before anything uses them."""
        found = self._found.get(job_id)
        if found is not None and found.stored is not None and found.digests is None:
            try:
                found.digests = self._digests.of_blocks(found.block_ids)
            except BaseException as error:  # noqa: BLE001 -- see above
                raise_if_unstoppable(error)
                self._not_made(job_id, error)

    def with_digests(self, reports: Iterable[JobReport]) -> list[JobReport]:
        """Return the reports, and add to them the digests of the jobs whose copies succeeded."""
        return [self._with_digests(report) for report in reports]

    def _with_digests(self, report: JobReport) -> JobReport:
        digested = tuple([found for job_id in report.job_ids if (found := self._of_job(job_id, report)) is not None])
        return attrs.evolve(report, digested=digested) if digested else report

    def _of_job(self, job_id: int, report: JobReport) -> DigestedJob | None:
        if report.done:
            self.after_load(job_id)
        found = self._found.pop(job_id, None)
        if found is None or found.digests is None or not report.done:
            return None
        stored = () if found.stored is None else tuple(found.stored.tolist())
        return DigestedJob(job_id, found.pages, tuple(found.digests.tolist()), stored)

    def _make(self, job: PageJob, make: Callable[[_Numbers, _Numbers, _Numbers], _Found]) -> None:
        chosen = [each for each in zip(job.pages, job.block_ids, job.slots, strict=bool(job.pages)) if each[0] >= 0]
        if not chosen:
            return
        try:
            self._found[job.job_id] = make(*zip(*chosen, strict=True))
        except BaseException as error:  # noqa: BLE001 -- see above
            raise_if_unstoppable(error)
            self._not_made(job.job_id, error)

    def _not_made(self, job_id: int, error: BaseException) -> None:
        self._found.pop(job_id, None)
        messages.warning("digests of pages could not be made; the copy goes on", job_id=job_id, error=described(error))
