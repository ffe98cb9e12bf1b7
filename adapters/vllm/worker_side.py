"""The worker's half of the connector: copies the pages of each step's jobs, and reports every job.

A worker repeats a report only if the scheduler's side asks for it. The worker knows blocks and slots, but not requests.
The scheduler's side decides what to do after a failed copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from kvledger.adapters.vllm import versions
from kvledger.adapters.vllm.async_copies import AsyncCopies
from kvledger.adapters.vllm.messages import messages
from kvledger.adapters.vllm.metadata import (
    Ends,
    JobReport,
    PageJob,
    StepJobs,
    StepReport,
    WorkerReports,
    WorkerStart,
)
from kvledger.adapters.vllm.step_clock import StepClock
from kvledger.adapters.vllm.worker_digests import WorkerDigests
from kvledger.lifecycle import Hook, raise_if_unstoppable
from kvledger.storage.kv import (
    BlockLayout,
    CopyEngine,
    HostPool,
    PageDigests,
    PendingCopy,
    Sharing,
    describe_blocks,
    make_copy_engine,
)

if TYPE_CHECKING:
    import torch

_Registered = TypeVar("_Registered")
_Begin = Callable[[Sequence[PageJob], CopyEngine | None], PendingCopy]
MAX_JOINED_BYTES = 16 << 20
"""Largest number of bytes that one call copies for several saves. So small that no save waits long for the others."""


def describe_pages(kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> BlockLayout:
    """Return where each block lies in the tensors that vLLM registers."""
    tensors = versions.registered_tensors(dict(kv_caches))
    dimensions = {name: versions.block_dimension(t.shape, num_blocks) for name, t in tensors.items()}
    return describe_blocks(
        tensors,
        num_blocks=num_blocks,
        block_dims={name: dimension for name, dimension in dimensions.items() if dimension is not None},
    )


class WorkerSide:
    """Owns the copy engines of one rank, and the rank's host pool or its share of a pool of all ranks.

    If ranks share a pool, each rank loads all pages and saves only the pages of its own slots. A save is complete when
    every rank has reported it. Before that, no request loads the save's pages (LOADABLE_AFTER_COMMIT).
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_blocks: int,
        rank: int = 0,
        is_async: bool = False,
        declined: tuple[str, ...] = (),
        sharing: Sharing | None = None,
    ) -> None:
        self._num_slots = num_slots
        self._num_blocks = num_blocks
        self._rank = rank
        self._is_async = is_async
        self._declined = declined
        self._sharing = sharing
        self._start_to_report: WorkerStart | None = None
        self._pool: HostPool | None = None
        self._engine: CopyEngine | None = None
        self._async_engine: CopyEngine | None = None
        self._clock = StepClock()
        self._copies = AsyncCopies(rank, self._clock)
        self._digests: WorkerDigests | None = None
        self._step: StepJobs | None = None
        self._bound: StepJobs | None = None
        self._ends = Ends()
        self._unfilled: frozenset[int] = frozenset()
        self._executed: set[int] = set()
        self._max_joined_pages = 1
        self._reports: list[JobReport] = []
        self._failed_block_ids: set[int] = set()
        self._sleeps = False
        self._messages = messages.bind()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor], *, is_alone: bool = True) -> None:
        """Find out where each block lies, and allocate the pool. vLLM calls this one time, at start. May raise.

        If `is_alone` is false, another connector may write blocks in an order that no stream of the device enforces.
        The CPU then waits for each copy on which later work depends.
        """
        if self._declined:
            self._start_to_report = WorkerStart(self._rank, 0, 0, copies_async=False, declined=self._declined)
            return
        layout = describe_pages(kv_caches, self._num_blocks)
        is_cuda = layout.device.type == "cuda"
        self._max_joined_pages = max(1, MAX_JOINED_BYTES // layout.block_bytes)
        self._copies = AsyncCopies(self._rank, self._clock, waits=not is_alone)
        self._pool = HostPool(self._num_slots, layout.block_bytes, pin=is_cuda, sharing=self._sharing)
        self._digests = WorkerDigests(PageDigests(layout, self._pool))
        batched_copy = versions.batched_copy() if is_cuda else None
        self._engine = make_copy_engine(layout, self._pool, batched_copy=batched_copy)
        if self._is_async:
            self._async_engine = make_copy_engine(layout, self._pool, is_async=True, batched_copy=batched_copy)
        self._start_to_report = WorkerStart(
            self._rank, self._pool.num_slots, self._pool.slot_bytes, copies_async=self._async_engine is not None
        )
        self._messages.info(
            "host pool ready",
            num_slots=self._num_slots,
            block_bytes=layout.block_bytes,
            host_bytes=self._num_slots * layout.block_bytes,
            pinned=self._pool.is_pinned,
            num_ranks_sharing=1 if self._sharing is None else self._sharing.num_ranks,
            num_layers=len(layout.layers),
            runs_a_block=len(layout.runs()),
        )

    def enter(self, hook: Hook, jobs: StepJobs | None) -> None:
        """Record that vLLM calls `hook`, so that copies that begin now are recorded with this hook.

        `jobs` are the jobs of the hook's step; None if the step has none.
        """
        self._clock.enter(hook, 0 if jobs is None else jobs.delivered)
        self._bound = jobs

    def gave(self, ends: Ends) -> None:
        """Keep the ends that the step's output reports to vLLM, so that the rank's `StepReport` can list them."""
        self._ends = ends

    def gave_unfilled(self, block_ids: set[int]) -> None:
        """Keep the blocks that the step's output reports to vLLM as not filled. The rank's `StepReport` lists them."""
        if block_ids:
            self._unfilled |= block_ids

    def before_forward(self, jobs: StepJobs) -> None:
        """Save the blocks that the step may overwrite (`handle_preemptions`). A second call has no effect."""
        self._precede(jobs)

    def load(self, jobs: StepJobs) -> None:
        """Run the loads that the forward needs, and begin the asynchronous loads (`start_load_kv`)."""
        self._precede(jobs)  # in case no hook came before
        for job in self._not_begun(jobs.loads):
            if not self._copy((job,), self._begin_load):
                self._failed_block_ids.update(job.block_ids)
        for job in self._not_begun(jobs.async_loads):
            self._start((job,), self._begin_load, self._async_engine)

    def save(self, jobs: StepJobs) -> None:
        """Begin the saves of settled chunks (`wait_for_save`), and first all other copies that no hook has begun yet.

        These saves begin after the forward, because vLLM's prefix cache may give a request blocks that another request
        fills in the same step.
        """
        self.load(jobs)
        for together in self._joined(jobs.saves):
            self._copy(together, self._begin_save)
        for together in self._joined(jobs.async_saves):
            self._start(together, self._begin_save, self._async_engine)

    def take_failed_block_ids(self) -> set[int]:
        """Return the blocks that vLLM expects to be loaded but that were not filled, and forget these blocks."""
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def take_start(self) -> WorkerStart | None:
        """Return the description of this rank's host pool in the first call, None in later calls."""
        start, self._start_to_report = self._start_to_report, None
        return start

    def take_reports(self) -> WorkerReports | None:
        """Return the reports since the last call; None if there are none."""
        reports, self._reports = [*self._reports, *self._copies.take_done()], []
        if self._digests is not None:
            reports = self._digests.with_digests(reports)
        start = self.take_start()
        starts = () if start is None else (start,)
        steps = self._take_step()
        return WorkerReports(tuple(reports), starts, steps) if reports or starts or steps else None

    def _take_step(self) -> tuple[StepReport, ...]:
        """Return the `StepReport` of this output's step; empty if the step has nothing to report.

        A step whose jobs must be reported has a `StepReport` even if no copy has ended. A copy that was never made is
        therefore noticed.
        """
        jobs, self._bound = self._bound, None
        ends, self._ends = self._ends, Ends()
        unfilled, self._unfilled = self._unfilled, frozenset()
        has_reports = jobs is not None and jobs.has_reports and bool(jobs.delivered)
        if not has_reports and not unfilled:
            return ()
        delivered = 0 if jobs is None else jobs.delivered
        return (StepReport(delivered, self._rank, self._copies.under_way(), ends, unfilled),)

    def give_way(self) -> None:
        """Let copying threads get the interpreter lock, in a step that computes nothing."""
        self._copies.give_way()

    def sleep(self) -> None:
        """Finish copies in flight before vLLM frees the KV memory. Until `wake`, new copies are reported as failed."""
        self._reports += self._copies.wait_for_all()
        self._sleeps = True

    def wake(self) -> None:
        """Allow copies again. The KV memory is back at the same addresses, but empty. The host pool was kept."""
        self._sleeps = False

    def close(self) -> None:
        """Finish copies in flight and free the pool. May be called twice."""
        for engine in (self._async_engine, self._engine):
            if engine is not None:
                engine.close()
        if self._pool is not None:
            self._pool.close()
        self._engine = self._async_engine = self._pool = None

    def _precede(self, jobs: StepJobs) -> None:
        self._begin(jobs)
        for together in self._joined(jobs.saves_before_forward):
            self._copy(together, self._begin_save)

    def _begin(self, jobs: StepJobs) -> None:
        if jobs is not self._step:
            self._step = jobs
            self._executed.clear()
            self._failed_block_ids.update(jobs.undeliverable_block_ids)
            self._reports += self._copies.precede(jobs.awaited)
            self._reports += self._copies.report_again(jobs.asked_after)

    def _begin_save(self, jobs: Sequence[PageJob], engine: CopyEngine | None) -> PendingCopy:
        for job in jobs:
            self._awake(self._digests).before_save(job)
        block_ids, slots = _pairs(jobs)
        if self._sharing is not None:
            written = [pair for pair in zip(block_ids, slots, strict=True) if self._sharing.writes(pair[1])]
            block_ids, slots = tuple(block_id for block_id, _ in written), tuple(slot for _, slot in written)
        return self._awake(engine).start_save(block_ids, slots)

    def _begin_load(self, jobs: Sequence[PageJob], engine: CopyEngine | None) -> PendingCopy:
        for job in jobs:
            self._awake(self._digests).before_load(job)
        block_ids, slots = _pairs(jobs)
        return self._awake(engine).start_load(slots, block_ids)

    def _not_begun(self, jobs: Sequence[PageJob]) -> list[PageJob]:
        """Return the jobs that no hook of this step has begun, and mark them as begun."""
        fresh = [job for job in jobs if job.job_id not in self._executed]
        self._executed.update(job.job_id for job in fresh)
        return fresh

    def _joined(self, saves: Sequence[PageJob]) -> Iterator[Sequence[PageJob]]:
        """Yield groups of saves that are copied in one call and reported together.

        Saves are joined because a call costs more than the pages of one chunk. A group is limited in size, because a
        request may wait for any save in it.
        """
        together: list[PageJob] = []
        num_pages = 0
        for job in self._not_begun(saves):
            if len(job.slots) > self._max_joined_pages:
                yield (job,)
                continue
            if together and num_pages + len(job.slots) > self._max_joined_pages:
                yield together
                together, num_pages = [], 0
            together.append(job)
            num_pages += len(job.slots)
        if together:
            yield together

    def _start(self, jobs: Sequence[PageJob], begin: _Begin, engine: CopyEngine | None) -> None:
        try:
            self._copies.start(_ids(jobs), partial(begin, jobs, engine))
        except BaseException as error:  # noqa: BLE001 -- a failed copy costs its request the cache, not the worker its life
            raise_if_unstoppable(error)
            if len(jobs) == 1:
                self._reports.append(self._copies.failed(_ids(jobs), error))
                return
            for job in jobs:  # one bad job must not fail the others
                self._start((job,), begin, engine)

    def _copy(self, jobs: Sequence[PageJob], begin: _Begin) -> bool:
        """Begin a copy that the device finishes before any new work; return False if the copy has failed already."""
        num_before = len(self._reports)
        self._start(jobs, begin, self._engine)
        self._reports += self._copies.precede(_ids(jobs))
        failed = [report for report in self._reports[num_before:] if not report.done]
        if self._digests is not None and not failed:
            self._digests.after_load(jobs[0].job_id)
        return not failed

    def _awake(self, registered: _Registered | None) -> _Registered:
        if registered is None:
            message = "no KV caches were registered, or the worker was closed"
            raise RuntimeError(message)
        if self._sleeps:
            message = "the engine sleeps, so its KV memory is freed"
            raise RuntimeError(message)
        return registered


def _ids(jobs: Sequence[PageJob]) -> tuple[int, ...]:
    return tuple([job.job_id for job in jobs])


def _pairs(jobs: Sequence[PageJob]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the blocks and the slots of all jobs."""
    if len(jobs) == 1:
        return jobs[0].block_ids, jobs[0].slots
    return (
        tuple(chain.from_iterable([job.block_ids for job in jobs])),
        tuple(chain.from_iterable([job.slots for job in jobs])),
    )
