"""Every copy that is under way, as the log tells it: since when, and which ranks have spoken. The audit's own.

It is kept apart from `projections/transfers.py` on purpose: a mistake there must not hide itself. Several rules ask
about the job of every report and settlement, so it is looked up once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.host_slots import NO_SLOT
from kvledger.lifecycle.projections.transfers import Job, JobKind
from kvledger.lifecycle.replay import Check, ReplayedEvent

_NO_RANKS: frozenset[int] = frozenset()


class InFlight(msgspec.Struct, gc=False):
    """One load or save that has not been settled."""

    sequence: int
    """Of the event that issued it; 0 where that was before the audit began."""
    request_id: str
    is_load: bool
    job: Job | None
    """What it copies, as it was issued."""
    epoch: int
    """Resets before it was issued."""
    since_step: int
    """When it was issued, or asked after."""
    since_ns: int
    leaves_out: bool = False
    """Whether some pages of a save are not copied, because a window had left them."""
    is_asked_after: bool = False
    ranks_done: frozenset[int] = _NO_RANKS
    ranks_failed: frozenset[int] = _NO_RANKS


class JobsInFlight:
    """Job id -> job, from the event that issues it to the one that settles it."""

    def __init__(self, num_ranks: int) -> None:
        self.every_rank = frozenset(range(num_ranks))
        self._all_ranks = tuple(range(num_ranks))
        self._jobs: dict[int, InFlight] = {}
        # The dict's own method, because it is asked often. So the dict is changed, never replaced.
        self.get: Callable[[int], InFlight | None] = self._jobs.get
        self.loads: set[int] = set()
        """Ids of the loads among the jobs."""
        self.saves_beside: set[int] = set()
        """Ids of the saves beside the steps among the jobs."""
        self.current: InFlight | None = None
        """The job that the event at hand issues, reports or settles."""
        self.told_before: frozenset[int] = _NO_RANKS
        """Ranks that had spoken of the current job before the report at hand."""
        self.is_plain_report = False
        """Whether the report at hand is the first of its job: every rank, each once, has done it."""
        self.report_sequence = 0
        """Of the last report."""
        self.failure_sequence = 0
        """Of the last report of a failure."""
        self.is_withheld = False
        """Whether that was the failure of a job that no worker was given."""
        self.epoch = 0
        """Resets so far."""

    def __iter__(self) -> Iterator[tuple[int, InFlight]]:
        return iter(self._jobs.items())

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, projections: Projections) -> None:
        """Take over the jobs in flight, since when they are silent, and who has reported them."""
        self.epoch = projections.transfers.epoch
        for job in projections.transfers:
            self._jobs[job.job_id] = InFlight(
                0,
                job.request_id,
                job.kind is JobKind.LOAD,
                job,
                job.epoch,
                job.asked_step,
                job.asked_ns,
                NO_SLOT in job.slots,
                job.is_asked_after,
                job.ranks_done,
                job.ranks_failed,
            )
            if job.kind is JobKind.LOAD:
                self.loads.add(job.job_id)
            elif job.is_async:
                self.saves_beside.add(job.job_id)

    def folds(self) -> Iterable[tuple[type[e.Event], Check]]:
        """(event class, fold), to be done as checks are; they never find anything."""
        return [
            (e.LoadIssued, self._issued),
            (e.SaveIssued, self._issued),
            (e.TailSaveIssued, self._issued),
            (e.TransferReported, self._reported),
            (e.TransferAwaited, self._awaited),
            (e.LoadCompleted, self._load_settled),
            (e.LoadFailed, self._load_settled),
            (e.SaveCompleted, self._settled),
            (e.SaveFailed, self._settled),
            (e.CacheReset, self._reset),
        ]

    def _issued(
        self, event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued, step: ReplayedEvent, projections: Projections
    ) -> None:
        job_id, tracker, is_load = event.job_id, projections.tracker, type(event) is e.LoadIssued
        if is_load:
            self.loads.add(job_id)
        elif step.job is not None and step.job.is_async:
            self.saves_beside.add(job_id)
        self.current = self._jobs[job_id] = InFlight(
            step.sequence,
            event.request_id,
            is_load,
            step.job,
            self.epoch,
            tracker.num_steps,
            tracker.time_ns,
            NO_SLOT in event.slots,
        )

    def _reported(self, event: e.TransferReported, step: ReplayedEvent, _projections: Projections) -> None:
        self.report_sequence = step.sequence
        self.current = job = self.get(event.job_id)
        if event.ranks_failed:
            self.failure_sequence = step.sequence
            self.is_withheld = bool(event.withheld)
        elif (
            job is not None and event.ranks_done == self._all_ranks and job.ranks_done is _NO_RANKS is job.ranks_failed
        ):
            job.ranks_done = self.every_rank
            self.is_plain_report = True
            return
        self.is_plain_report = False
        if job is not None:
            self._told_more(job, event)

    def _told_more(self, job: InFlight, event: e.TransferReported) -> None:
        self.told_before = job.ranks_done | job.ranks_failed
        owing = self.every_rank - self.told_before
        job.ranks_done |= owing.intersection(event.ranks_done)
        job.ranks_failed |= owing.intersection(event.ranks_failed) - job.ranks_done

    def _awaited(self, event: e.TransferAwaited, _step: ReplayedEvent, projections: Projections) -> None:
        job = self._jobs.get(event.job_id)
        # Who was asked twice in vain is not asked a third time.
        if job is not None and (event.before_forward or not job.is_asked_after):
            job.since_step, job.since_ns = projections.tracker.num_steps, projections.tracker.time_ns
            job.is_asked_after |= not event.before_forward

    def _settled(self, event: e.SaveCompleted | e.SaveFailed, _step: ReplayedEvent, _projections: Projections) -> None:
        self.current = self._jobs.pop(event.job_id, None)
        if self.saves_beside:
            self.saves_beside.discard(event.job_id)

    def _load_settled(
        self, event: e.LoadCompleted | e.LoadFailed, _step: ReplayedEvent, _projections: Projections
    ) -> None:
        self.current = self._jobs.pop(event.job_id, None)
        self.loads.discard(event.job_id)

    def _reset(self, _event: e.CacheReset, _step: ReplayedEvent, _projections: Projections) -> None:
        self.epoch += 1
