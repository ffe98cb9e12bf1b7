"""Keeps a worker's copies from their start to their report, which may be in a later step.

If a forward depends on a copy, this module orders the copy before the forward. It knows jobs, not requests.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import attrs

from kvledger.adapters.vllm.messages import messages
from kvledger.adapters.vllm.metadata import JobReport
from kvledger.adapters.vllm.step_clock import StepClock
from kvledger.lifecycle import CopyMoments, Moment, described, raise_if_unstoppable
from kvledger.storage.kv import PendingCopy

IDLE_WAIT_S = 0.001
"""Seconds that a step pauses if it computes nothing. Longer than the calls of one copy to torch, shorter than the time
to a new request's first token."""
MAX_REMEMBERED = 4096
"""Number of jobs whose last report is kept, in case the scheduler's side asks for the report again."""


class AsyncCopies:
    """The pending copies of one rank, and the latest reports of ended copies.

    If later work depends on a copy, the device runs the copy first. If `waits` is true, the CPU waits until the copy
    has ended, before it starts that work. `clock` numbers the moments at which copies begin and end.
    """

    def __init__(self, rank: int, clock: StepClock | None = None, *, waits: bool = False) -> None:
        self._rank = rank
        self._clock = StepClock() if clock is None else clock
        self._waits = waits
        self._pending: dict[tuple[int, ...], PendingCopy] = {}
        """Job ids of a pending copy → the copy."""
        self._copy_of: dict[int, tuple[int, ...]] = {}
        """Job id → ids of all jobs that are copied together with this one."""
        self._began: dict[tuple[int, ...], Moment] = {}
        """Job ids of a pending copy → when the copy began."""
        self._preceded: dict[tuple[int, ...], Moment] = {}
        """Job ids of a pending copy → the moment from which on the device runs all new work after the copy."""
        self._reported: OrderedDict[int, JobReport] = OrderedDict()

    def start(self, job_ids: tuple[int, ...], begin: Callable[[], PendingCopy]) -> None:
        """Begin one copy for these jobs by calling `begin`.

        If `begin` raises, this method raises the same error, and no copy is pending. Report the jobs with `failed`.
        """
        began = self._clock.now()
        self._pending[job_ids] = begin()
        self._began[job_ids] = began
        self._copy_of.update(dict.fromkeys(job_ids, job_ids))

    def failed(self, job_ids: tuple[int, ...], error: BaseException, moments: CopyMoments | None = None) -> JobReport:
        """Return the report of a copy that failed or could not begin. `moments`: when it began and ended; None: now."""
        if moments is None:
            moments = CopyMoments(now := self._clock.now(), now)
        text = described(error)
        messages.error(
            "a copy failed; if it was a load, its request computes the tokens again or fails (kv_load_failure_policy)",
            job_ids=job_ids,
            error=text,
        )
        report = JobReport(
            job_ids,
            self._rank,
            done=False,
            num_bytes=0,
            duration_ns=0,
            error=text,
            moments=moments.as_fields(),
        )
        return self._remember(report)

    def take_done(self) -> list[JobReport]:
        """Return the reports of pending copies that have ended. Does not wait for other copies."""
        done = [job_ids for job_ids, copy in self._pending.items() if _is_over(copy)]
        if not done:
            return []
        now = self._clock.now()  # one for all: nothing else came between them
        return [self._end(job_ids, now) for job_ids in done]

    def under_way(self) -> tuple[int, ...]:
        """Return the jobs of pending copies that the device finishes before any new work."""
        return tuple([job_id for job_ids in self._preceded for job_id in job_ids])

    def precede(self, job_ids: Iterable[int]) -> list[JobReport]:
        """Make the device finish these jobs' copies before any new work; return reports of copies that have ended."""
        if self._waits:
            return self.wait_for(job_ids)
        pending = {copied: self._pending[copied] for job_id in job_ids if (copied := self._copy_of.get(job_id))}
        if not pending:
            return []
        preceding = {copied for copied, copy in pending.items() if _precedes(copy)}
        now = self._clock.now()
        for copied in preceding:
            self._preceded.setdefault(copied, now)
        return [
            self._end(copied, now if copied in preceding else None)
            for copied, copy in pending.items()
            if copied not in preceding or _is_over(copy)
        ]

    def give_way(self) -> None:
        """If a copy is pending, pause so that its thread gets the interpreter lock.

        An engine with nothing to compute runs steps in a loop. Each torch call of a copying thread then waits up to
        5 ms (`sys.getswitchinterval`) for the interpreter lock. Without this pause, a load of 124 MiB took 14 to 78 ms
        and 45 to 268 steps. With the pause, it took 14 to 24 ms and 7 to 17 steps (real vLLM on two busy cores).
        """
        if self._pending:
            time.sleep(IDLE_WAIT_S)

    def wait_for(self, job_ids: Iterable[int]) -> list[JobReport]:
        """Wait for the copies of these jobs; return reports of the copies that were pending."""
        return [self._end(copied) for job_id in job_ids if (copied := self._copy_of.get(job_id)) is not None]

    def wait_for_all(self) -> list[JobReport]:
        """Wait for every pending copy; return the reports of these copies."""
        return [self._end(job_ids) for job_ids in tuple(self._pending)]

    def report_again(self, job_ids: Iterable[int]) -> list[JobReport]:
        """Report these jobs again. First waits for their pending copies, because a running copy has no report yet."""
        ended = self.wait_for(job_ids := tuple(job_ids))
        just_ended = {job_id for report in ended for job_id in report.job_ids}
        return [*ended, *(self._repeated(job_id) for job_id in job_ids if job_id not in just_ended)]

    def _repeated(self, job_id: int) -> JobReport:
        reported = self._reported.get(job_id)
        if reported is not None:
            return attrs.evolve(
                reported, job_ids=(job_id,), num_bytes=reported.num_bytes // len(reported.job_ids), is_repeated=True
            )
        error = "this worker does not know this job"
        return JobReport((job_id,), self._rank, done=False, num_bytes=0, duration_ns=0, error=error, is_repeated=True)

    def _end(self, job_ids: tuple[int, ...], now: Moment | None = None) -> JobReport:
        """Wait for a copy to end; return its report. `now`: moment at which the caller saw that the copy had ended."""
        copy = self._pending.pop(job_ids)
        began, preceded = self._began.pop(job_ids), self._preceded.pop(job_ids, None)
        for job_id in job_ids:
            del self._copy_of[job_id]
        error: BaseException | None = None
        try:
            result = copy.result()
        except BaseException as raised:  # noqa: BLE001 -- a failed copy costs its request the cache, not the worker its life
            raise_if_unstoppable(raised)
            error = raised
        moments = CopyMoments(began, preceded or now or self._clock.now())
        if error is not None:
            return self.failed(job_ids, error, moments)
        report = JobReport(
            job_ids,
            self._rank,
            done=True,
            num_bytes=result.num_bytes,
            duration_ns=result.duration_ns,
            moments=moments.as_fields(),
        )
        return self._remember(report)

    def _remember(self, report: JobReport) -> JobReport:
        self._reported.update(dict.fromkeys(report.job_ids, report))
        while len(self._reported) > MAX_REMEMBERED:
            self._reported.popitem(last=False)
        return report


def _is_over(copy: PendingCopy) -> bool:
    """Whether the copy has ended. True if `done` raises: the caller then waits for the copy and reports its error."""
    try:
        return copy.done()
    except BaseException as error:  # noqa: BLE001 -- as in `_end`
        raise_if_unstoppable(error)
        return True


def _precedes(copy: PendingCopy) -> bool:
    """Make the device finish the copy before any new work.

    Returns whether this succeeded. If not, the caller must wait for the copy.
    """
    try:
        copy.precede()
    except BaseException as error:  # noqa: BLE001 -- as in `_end`
        raise_if_unstoppable(error)
        return False
    return True
