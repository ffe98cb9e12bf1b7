"""Mutants of the order of copies in a worker: too late, too early, or never."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvledger.adapters.vllm.async_copies import AsyncCopies
from kvledger.adapters.vllm.connector import KVLedgerConnector
from kvledger.adapters.vllm.metadata import StepJobs
from kvledger.adapters.vllm.worker_side import WorkerSide
from mutants.catalogue.parts import wrapped
from mutants.mutant import Patch, Touch, mutant
from mutants.scenes import Worlds

SYNC = (("load_mode", "sync"), ("save_mode", "sync"))
ASYNC = (("load_mode", "async"), ("save_mode", "async"))
NOT_DIGESTED = Worlds(connector=(*SYNC, ("digests", "off")), settings=(("num_steps", 120), ("late_reports", True)))
"""With digests, BYTES_UNCHANGED would report the wrong bytes first."""
MUST_PRECEDE = ("saves_before_forward", "awaited")


def _has(jobs: object, *names: str) -> bool:
    return isinstance(jobs, StepJobs) and any(getattr(jobs, name) for name in names)


def _beside_the_step(touch: Touch, begin_name: str) -> Patch:
    """Patch that gives the copies that `begin_name` begins to the engine for asynchronous copies."""

    def copy(original: Any, side: WorkerSide, jobs: Any, begin: Any) -> bool:
        if side._async_engine is None or begin != getattr(side, begin_name):
            found: bool = original(side, jobs, begin)
            return found
        touch()
        side._start(jobs, begin, side._async_engine)
        return True

    return wrapped(WorkerSide, "_copy", copy)


@mutant("COPY_IN_TIME", scene=Worlds())
def preemptions_unhandled(touch: Touch) -> Sequence[Patch]:
    """`handle_preemptions` does nothing."""

    def before_forward(_original: Any, _side: WorkerSide, jobs: StepJobs) -> None:
        if _has(jobs, *MUST_PRECEDE):
            touch()

    return [wrapped(WorkerSide, "before_forward", before_forward)]


@mutant("COPY_IN_TIME", scene=Worlds())
def preemptions_of_the_step_before(touch: Touch) -> Sequence[Patch]:
    """`handle_preemptions` uses the bound metadata, not its argument, but this step's metadata is not bound yet."""

    def handle_preemptions(original: Any, connector: KVLedgerConnector, metadata: Any) -> None:
        if _has(metadata, *MUST_PRECEDE):
            touch()
        original(connector, connector._connector_metadata)

    return [wrapped(KVLedgerConnector, "handle_preemptions", handle_preemptions)]


@mutant("COPY_IN_TIME", scene=Worlds())
def saved_after_the_forward(touch: Touch) -> Sequence[Patch]:
    """A worker makes a save that must precede the forward pass together with the saves that follow the pass."""

    def precede(_original: Any, side: WorkerSide, jobs: StepJobs) -> None:
        side._begin(jobs)
        if jobs.saves_before_forward:
            touch()

    def save(original: Any, side: WorkerSide, jobs: StepJobs) -> None:
        original(side, jobs)
        for together in side._joined(jobs.saves_before_forward):
            side._copy(together, side._begin_save)

    return [wrapped(WorkerSide, "_precede", precede), wrapped(WorkerSide, "save", save)]


@mutant("COPY_IN_TIME", scene=Worlds())
def saved_before_the_forward(touch: Touch) -> Sequence[Patch]:
    """A worker makes saves together with the loads, so the saves read blocks before the forward pass fills them."""

    def load(original: Any, side: WorkerSide, jobs: StepJobs) -> None:
        original(side, jobs)
        if _has(jobs, "saves", "async_saves"):
            touch()
            for together in side._joined(jobs.saves):
                side._copy(together, side._begin_save)
            for together in side._joined(jobs.async_saves):
                side._start(together, side._begin_save, side._async_engine)

    return [wrapped(WorkerSide, "load", load)]


@mutant("COPY_IN_TIME", scene=Worlds())
def loaded_before_what_precedes(touch: Touch) -> Sequence[Patch]:
    """A worker makes a step's loads before it has saved the blocks that these loads overwrite."""

    def precede(original: Any, side: WorkerSide, jobs: StepJobs) -> None:
        side._begin(jobs)
        for job in side._not_begun(jobs.loads):
            touch()
            side._copy((job,), side._begin_load)
        original(side, jobs)

    return [wrapped(WorkerSide, "_precede", precede)]


@mutant("COPY_IN_TIME", scene=Worlds(connector=ASYNC))
def loaded_as_soon_as_handed_out(touch: Touch) -> Sequence[Patch]:
    """An asynchronous load begins in `handle_preemptions`, though saves still read the blocks that it overwrites."""

    def precede(original: Any, side: WorkerSide, jobs: StepJobs) -> None:
        side._begin(jobs)
        for job in side._not_begun(jobs.async_loads):
            touch()
            side._start((job,), side._begin_load, side._async_engine)
        original(side, jobs)

    return [wrapped(WorkerSide, "_precede", precede)]


@mutant("COPY_IN_TIME", scene=Worlds(connector=SYNC))
def second_load_forgotten(touch: Touch) -> Sequence[Patch]:
    """A worker makes only the first of several loads that a step waits for."""

    def not_begun(original: Any, side: WorkerSide, jobs: Any) -> Any:
        if side._step is not None and jobs is side._step.loads and len(jobs) > 1:
            touch()
            return original(side, jobs[:1])
        return original(side, jobs)

    return [wrapped(WorkerSide, "_not_begun", not_begun)]


@mutant("COPY_IN_TIME", scene=Worlds(connector=SYNC))
def save_forgotten(touch: Touch) -> Sequence[Patch]:
    """A worker never makes the last of several saves in a step."""

    def not_begun(original: Any, side: WorkerSide, jobs: Any) -> Any:
        if side._step is not None and jobs is side._step.saves and len(jobs) > 1:
            touch()
            return original(side, jobs[:-1])
        return original(side, jobs)

    return [wrapped(WorkerSide, "_not_begun", not_begun)]


@mutant("COPY_IN_TIME", scene=Worlds(connector=ASYNC))
def saved_beside_the_step(touch: Touch) -> Sequence[Patch]:
    """A worker makes a synchronous save like an asynchronous one, and does not wait for the save."""
    return [_beside_the_step(touch, "_begin_save")]


@mutant("COPY_IN_TIME", scene=Worlds(connector=(("load_mode", "sync"), ("save_mode", "async"))))
def load_not_waited_for(touch: Touch) -> Sequence[Patch]:
    """A worker makes a synchronous load like an asynchronous one, and does not wait for the load."""
    return [_beside_the_step(touch, "_begin_load")]


@mutant("COPY_IN_TIME", scene=Worlds(connector=ASYNC))
def not_awaited(touch: Touch) -> Sequence[Patch]:
    """A worker does not wait for the copies that a step must wait for."""

    def precede(original: Any, copies: AsyncCopies, job_ids: Any) -> Any:
        if _is_awaiting[-1:] != [True]:
            return original(copies, job_ids)
        if any(job_id in copies._copy_of for job_id in job_ids):
            touch()
        return []

    _is_awaiting: list[bool] = []

    def begin(original: Any, side: WorkerSide, jobs: StepJobs) -> None:
        _is_awaiting.append(True)
        original(side, jobs)
        _is_awaiting.pop()

    return [wrapped(AsyncCopies, "precede", precede), wrapped(WorkerSide, "_begin", begin)]


@mutant("COPY_IN_TIME", scene=Worlds(connector=ASYNC))
def awaited_with_the_loads(touch: Touch) -> Sequence[Patch]:
    """A worker waits for copies only when it makes a step's loads, though the step must wait for the copies earlier."""

    def begin(original: Any, side: WorkerSide, jobs: StepJobs) -> None:
        if jobs is side._step or not jobs.awaited:
            original(side, jobs)
            return
        if any(job_id in side._copies._copy_of for job_id in jobs.awaited):
            touch()
        precede = side._copies.precede
        side._copies.precede = lambda _job_ids: []  # type: ignore[method-assign]
        original(side, jobs)
        side._copies.precede = precede  # type: ignore[method-assign]

    def load(original: Any, side: WorkerSide, jobs: StepJobs) -> None:
        side._reports += side._copies.precede(jobs.awaited)
        original(side, jobs)

    return [wrapped(WorkerSide, "_begin", begin), wrapped(WorkerSide, "load", load)]


@mutant("COPY_IN_TIME", scene=NOT_DIGESTED)
def load_not_put_in_order(touch: Touch) -> Sequence[Patch]:
    """A worker does not make later work on the device wait for a load."""

    def copy(original: Any, side: WorkerSide, jobs: Any, begin: Any) -> bool:
        if begin != side._begin_load:
            found: bool = original(side, jobs, begin)
            return found
        touch()
        precede = side._copies.precede
        side._copies.precede = lambda _job_ids: []  # type: ignore[method-assign]
        try:
            return bool(original(side, jobs, begin))
        finally:
            side._copies.precede = precede  # type: ignore[method-assign]

    return [wrapped(WorkerSide, "_copy", copy)]


@mutant("COPY_IN_TIME", scene=Worlds(connector=SYNC))
def report_forgotten(touch: Touch) -> Sequence[Patch]:
    """A worker makes a copy that its step waits for, but does not report the copy."""

    def take_reports(original: Any, side: WorkerSide) -> Any:
        if len(side._reports) > 1:
            touch()
            del side._reports[-1]
        return original(side)

    return [wrapped(WorkerSide, "take_reports", take_reports)]


@mutant("COPY_IN_TIME", scene=Worlds(connector=(*SYNC, ("max_silent_steps", 100_000))))
def saved_a_step_later(touch: Touch) -> Sequence[Patch]:
    """A worker makes a step's saves in the next step, when their blocks may belong to another request."""
    last: dict[int, Any] = {}

    def save(original: Any, side: WorkerSide, jobs: StepJobs) -> None:
        side.load(jobs)
        before, last[id(side)] = last.get(id(side), ()), jobs.saves
        if before:
            touch()
        original(side, jobs)
        for together in side._joined(before):
            side._copy(together, side._begin_save)

    def not_begun(original: Any, side: WorkerSide, jobs: Any) -> Any:
        return [] if side._step is not None and jobs is side._step.saves else original(side, jobs)

    return [wrapped(WorkerSide, "save", save), wrapped(WorkerSide, "_not_begun", not_begun)]


@mutant("COPY_IN_TIME", scene=Worlds(connector=(*ASYNC, ("max_silent_steps", 6), ("max_silent_ms", 0))))
def questions_unanswered(touch: Touch) -> Sequence[Patch]:
    """A worker does not answer when the connector asks about a copy."""

    def report_again(original: Any, copies: AsyncCopies, job_ids: Any) -> Any:
        if job_ids:
            touch()
        return original(copies, ())

    return [wrapped(AsyncCopies, "report_again", report_again)]


@mutant("SETTLED_AT_CLOSE", scene=Worlds(connector=(*SYNC, ("max_silent_steps", 100_000)), closes=True))
def outputs_lost(touch: Touch) -> Sequence[Patch]:
    """From some step on, all worker reports are lost until the engine shuts down."""
    num_reports = [0]

    def take_reports(original: Any, side: WorkerSide) -> Any:
        reports = original(side)
        num_reports[0] += reports is not None
        if reports is None or num_reports[0] < 9:
            return reports
        touch()
        return None

    return [wrapped(WorkerSide, "take_reports", take_reports)]
