"""A worker's copies: begun in one step, reported in that one or a later one, put before a forward where they must be.

It knows jobs, blocks and slots, no requests.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import attrs

from kvledger.adapters.vllm.messages import messages
from kvledger.adapters.vllm.metadata import JobReport
from kvledger.lifecycle import described, raise_if_unstoppable
from kvledger.storage.kv import PendingCopy

IDLE_WAIT_S = 0.001
"""Long against a copy's calls, short against the first token of a request that arrives meanwhile."""
MAX_REMEMBERED = 4096
"""Reports that can be repeated; whoever asks does so within a few steps."""


class AsyncCopies:
    """The pending copies of one rank, and the latest reports.

    With `waits` it waits for copies that must precede what follows, instead of leaving that to the device's order.
    """

    def __init__(self, rank: int, *, waits: bool = False) -> None:
        self._rank = rank
        self._waits = waits
        self._pending: dict[tuple[int, ...], PendingCopy] = {}
        """By the jobs that it copies."""
        self._copy_of: dict[int, tuple[int, ...]] = {}
        """Job id -> all jobs that are copied with it."""
        self._reported: OrderedDict[int, JobReport] = OrderedDict()

    def start(self, job_ids: tuple[int, ...], begin: Callable[[], PendingCopy]) -> None:
        """Begin a copy that is for these jobs. Raises what `begin` raises; then there is none, see `failed`."""
        self._pending[job_ids] = begin()
        self._copy_of.update(dict.fromkeys(job_ids, job_ids))

    def failed(self, job_ids: tuple[int, ...], error: BaseException) -> JobReport:
        """The report of a copy that failed, or could not begin."""
        text = described(error)
        messages.error("a copy failed, what it was for is computed again", job_ids=job_ids, error=text)
        return self._remember(JobReport(job_ids, self._rank, done=False, num_bytes=0, duration_ns=0, error=text))

    def take_done(self) -> list[JobReport]:
        """Reports of the copies that have come to an end since the last call. Waits for nothing."""
        return [
            self._end(job_ids) for job_ids in [job_ids for job_ids, copy in self._pending.items() if _is_over(copy)]
        ]

    def precede(self, job_ids: Iterable[int]) -> list[JobReport]:
        """Put these copies before all that the device is given from now on; reports of those that are over."""
        if self._waits:
            return self.wait_for(job_ids)
        pending = {copied: self._pending[copied] for job_id in job_ids if (copied := self._copy_of.get(job_id))}
        return [self._end(copied) for copied, copy in pending.items() if not _precedes(copy) or _is_over(copy)]

    def give_way(self) -> None:
        """Let pending copies have the interpreter for a moment.

        An engine that has nothing to compute asks for them in a loop, and each torch call of a copying thread then
        waits for the interpreter lock, up to 5 ms (`sys.getswitchinterval`): a load of 124 MiB took 14 to 78 ms and
        45 to 268 steps; with this 14 to 24 ms and 7 to 17 steps (real vLLM on two busy cores).
        """
        if self._pending:
            time.sleep(IDLE_WAIT_S)

    def wait_for(self, job_ids: Iterable[int]) -> list[JobReport]:
        """Wait for these copies; reports of those that were under way."""
        return [self._end(copied) for job_id in job_ids if (copied := self._copy_of.get(job_id)) is not None]

    def wait_for_all(self) -> list[JobReport]:
        """Wait for every copy that is under way."""
        return [self._end(job_ids) for job_ids in tuple(self._pending)]

    def report_again(self, job_ids: Iterable[int]) -> list[JobReport]:
        """What was reported about these copies. Those under way are waited for: nobody may give up on one that runs."""
        ended = self.wait_for(job_ids := tuple(job_ids))
        just_ended = {job_id for report in ended for job_id in report.job_ids}
        return [*ended, *(self._repeated(job_id) for job_id in job_ids if job_id not in just_ended)]

    def _repeated(self, job_id: int) -> JobReport:
        reported = self._reported.get(job_id)
        if reported is not None:
            return attrs.evolve(
                reported, job_ids=(job_id,), num_bytes=reported.num_bytes // len(reported.job_ids), is_repeated=True
            )
        error = "this worker knows of no such job"
        return JobReport((job_id,), self._rank, done=False, num_bytes=0, duration_ns=0, error=error, is_repeated=True)

    def _end(self, job_ids: tuple[int, ...]) -> JobReport:
        copy = self._pending.pop(job_ids)
        for job_id in job_ids:
            del self._copy_of[job_id]
        try:
            result = copy.result()
        except BaseException as error:  # noqa: BLE001 -- a failed copy costs its request the cache, not the worker its life
            raise_if_unstoppable(error)
            return self.failed(job_ids, error)
        report = JobReport(job_ids, self._rank, done=True, num_bytes=result.num_bytes, duration_ns=result.duration_ns)
        return self._remember(report)

    def _remember(self, report: JobReport) -> JobReport:
        self._reported.update(dict.fromkeys(report.job_ids, report))
        while len(self._reported) > MAX_REMEMBERED:
            self._reported.popitem(last=False)
        return report


def _is_over(copy: PendingCopy) -> bool:
    """Whether the copy is done; also if that cannot be found out: its result, which is waited for, then says why."""
    try:
        return copy.done()
    except BaseException as error:  # noqa: BLE001 -- as in `_end`
        raise_if_unstoppable(error)
        return True


def _precedes(copy: PendingCopy) -> bool:
    """Put the copy before what follows; False if that failed, so that the copy has to be waited for."""
    try:
        copy.precede()
    except BaseException as error:  # noqa: BLE001 -- as in `_end`
        raise_if_unstoppable(error)
        return False
    return True
