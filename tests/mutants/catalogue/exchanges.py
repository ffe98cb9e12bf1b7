"""Mutants between the log and vLLM: the log is right, but vLLM, a worker or the log gets something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import msgspec

from kvledger.adapters.vllm import scheduler_side
from kvledger.adapters.vllm.connector import KVLedgerConnector
from kvledger.adapters.vllm.journal import Journal
from kvledger.adapters.vllm.metadata import StepJobs, WorkerReports
from kvledger.adapters.vllm.observe import RequestReader
from kvledger.adapters.vllm.scheduler_side import SchedulerSide
from kvledger.adapters.vllm.worker_side import WorkerSide
from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.copies import CopyKind
from kvledger.lifecycle.projections.owed import Owed
from mutants.catalogue.parts import wrapped
from mutants.mutant import Patch, Touch, mutant
from mutants.scenes import FailedLoads, Worlds

RULE = "TOLD_AS_DECIDED"
ASYNC_LOADS = Worlds(connector=(("load_mode", "async"), ("offer", "always")))
SYNC_LOADS = Worlds(connector=(("load_mode", "sync"), ("offer", "always")))
ASYNC_SAVES = Worlds(connector=(("save_mode", "async"), ("keep_for_preempted", True)))
LATE = Worlds(
    faults=frozenset({"aborts", "storms", "delayed reports"}),
    connector=(("load_mode", "async"), ("save_mode", "async"), ("offer", "always"), ("max_silent_steps", 64)),
)
LATE_IN_STEPS = Worlds(
    faults=frozenset({"delayed reports"}),
    connector=(("load_mode", "sync"), ("save_mode", "sync"), ("max_silent_steps", 64)),
    settings=(("num_steps", 40),),
)
RESETTING = Worlds(faults=frozenset({"aborts", "resets"}))
FAILING = Worlds(
    faults=frozenset({"aborts", "storms", "failing copies"}), connector=(("load_mode", "async"), ("offer", "always"))
)


def _answers(change: Callable[[SchedulerSide, Any, tuple[int | None, bool]], tuple[int | None, bool]]) -> Patch:
    """Patch that answers every lookup with `change(side, request, answer)`."""

    def answer(original: Any, side: SchedulerSide, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return change(side, request, original(side, request, num_computed_tokens))

    return wrapped(SchedulerSide, "get_num_new_matched_tokens", answer)


def _hands_out(change: Callable[[StepJobs], StepJobs]) -> Patch:
    """Patch that gives the workers `change(metadata)` in every step."""

    def step_jobs(original: Any, *arguments: Any) -> StepJobs:
        return change(original(*arguments))

    return wrapped(scheduler_side, "step_jobs", step_jobs)


@mutant(RULE, scene=Worlds())
def answers_a_block_less(touch: Touch) -> Sequence[Patch]:
    """If the connector decides to offer at most one block of tokens, it answers the lookup with 0 tokens instead."""

    def change(side: SchedulerSide, _request: Any, answer: tuple[int | None, bool]) -> tuple[int | None, bool]:
        num_tokens, _ = answer
        if not num_tokens or num_tokens > side._block_size:
            return answer
        touch()
        return 0, False

    return [_answers(change)]


@mutant(RULE, scene=Worlds())
def answers_the_last_one(touch: Touch) -> Sequence[Patch]:
    """If an answer should have more tokens than the answer to the previous lookup, the previous answer is repeated."""
    last: dict[int, tuple[int | None, bool]] = {}

    def change(side: SchedulerSide, _request: Any, answer: tuple[int | None, bool]) -> tuple[int | None, bool]:
        before = last.get(id(side), (0, False))
        last[id(side)] = answer
        if not answer[0] or before[0] is None or before[0] >= answer[0]:
            return answer
        touch()
        return before

    return [_answers(change)]


@mutant(RULE, "vllm#49829", scene=Worlds())
def asks_again_instead(touch: Touch) -> Sequence[Patch]:
    """The connector answers the first hit of a request with None, which defers the lookup."""
    asked: set[tuple[int, str]] = set()

    def change(side: SchedulerSide, request: Any, answer: tuple[int | None, bool]) -> tuple[int | None, bool]:
        which = id(side), request.request_id
        if not answer[0] or which in asked:
            return answer
        touch()
        asked.add(which)
        return None, False

    return [_answers(change)]


@mutant(RULE, "LMCache#4355", scene=ASYNC_LOADS)
def async_answered_as_sync(touch: Touch) -> Sequence[Patch]:
    """The connector reports an asynchronous load to vLLM as synchronous, so vLLM computes on unfilled blocks."""

    def change(_side: SchedulerSide, _request: Any, answer: tuple[int | None, bool]) -> tuple[int | None, bool]:
        if not answer[1]:
            return answer
        touch()
        return answer[0], False

    return [_answers(change)]


@mutant(RULE, scene=SYNC_LOADS)
def sync_answered_as_async(touch: Touch) -> Sequence[Patch]:
    """The connector reports a synchronous load to vLLM as asynchronous, so vLLM waits forever for the load's end."""

    def change(_side: SchedulerSide, _request: Any, answer: tuple[int | None, bool]) -> tuple[int | None, bool]:
        if not answer[0] or answer[1]:
            return answer
        touch()
        return answer[0], True

    return [_answers(change)]


def _ends(change: Callable[[SchedulerSide, Any, bool], bool]) -> Patch:
    """Patch that makes `request_finished` answer `change(side, request, keeps_blocks)`."""

    def finish(original: Any, side: SchedulerSide, request: Any, num_blocks: int) -> tuple[bool, None]:
        return change(side, request, original(side, request, num_blocks)[0]), None

    return wrapped(SchedulerSide, "request_finished", finish)


@mutant(RULE, "vllm#46240", scene=ASYNC_SAVES)
def freed_under_a_copy(touch: Touch) -> Sequence[Patch]:
    """The connector lets vLLM free an ended request's blocks, though the log says that a copy reads them."""

    def change(_side: SchedulerSide, _request: Any, keeps_blocks: bool) -> bool:
        if keeps_blocks:
            touch()
        return False

    return [_ends(change)]


@mutant(RULE, "vllm#50297", scene=Worlds())
def kept_without_a_copy(touch: Touch) -> Sequence[Patch]:
    """The connector makes vLLM keep the blocks of every ended request and wait for a report that never comes."""

    def change(_side: SchedulerSide, _request: Any, keeps_blocks: bool) -> bool:
        if not keeps_blocks:
            touch()
        return True

    return [_ends(change)]


@mutant(RULE, "vllm#30745", scene=Worlds())
def aborted_while_waiting_stays_open(touch: Touch) -> Sequence[Patch]:
    """The connector does not record the end of a request that ends without blocks and computed tokens."""

    def finish(original: Any, side: SchedulerSide, request: Any, num_blocks: int) -> Any:
        record = side._tracker.get(request.request_id)
        if num_blocks or record is None or side._tracker.num_computed_tokens(record):
            return original(side, request, num_blocks)
        touch()
        return None

    return [wrapped(SchedulerSide, "_finish", finish)]


@mutant(RULE, scene=SYNC_LOADS)
def load_left_out(touch: Touch) -> Sequence[Patch]:
    """Loads are recorded as given to the workers, but are missing from the step's metadata."""

    def change(jobs: StepJobs) -> StepJobs:
        if jobs.loads:
            touch()
        return msgspec.structs.replace(jobs, loads=())

    return [_hands_out(change)]


@mutant(RULE, "vllm#55209", scene=ASYNC_LOADS)
def second_load_left_out(touch: Touch) -> Sequence[Patch]:
    """The workers get only the first of several asynchronous loads in a step."""

    def change(jobs: StepJobs) -> StepJobs:
        if len(jobs.async_loads) > 1:
            touch()
        return msgspec.structs.replace(jobs, async_loads=jobs.async_loads[:1])

    return [_hands_out(change)]


@mutant(RULE, scene=Worlds())
def saved_too_late(touch: Touch) -> Sequence[Patch]:
    """In the step's metadata, saves that must precede the forward pass are listed with the saves that follow it."""

    def change(jobs: StepJobs) -> StepJobs:
        if jobs.saves_before_forward:
            touch()
        return msgspec.structs.replace(jobs, saves_before_forward=(), saves=(*jobs.saves, *jobs.saves_before_forward))

    return [_hands_out(change)]


@mutant(RULE, scene=Worlds())
def handed_out_with_other_slots(touch: Touch) -> Sequence[Patch]:
    """The workers get a save's slots in reverse order."""

    def change(jobs: StepJobs) -> StepJobs:
        saves = tuple(msgspec.structs.replace(job, slots=job.slots[::-1]) for job in jobs.saves)
        if saves != jobs.saves:
            touch()
        return msgspec.structs.replace(jobs, saves=saves)

    return [_hands_out(change)]


@mutant(RULE, scene=LATE)
def not_waited_for(touch: Touch) -> Sequence[Patch]:
    """The step's metadata leaves out the copies that must be finished before the step overwrites their blocks."""

    def change(jobs: StepJobs) -> StepJobs:
        if jobs.awaited:
            touch()
        return msgspec.structs.replace(jobs, awaited=())

    return [_hands_out(change)]


@mutant(RULE, "LMCache#4762", scene=ASYNC_SAVES)
def end_of_save_left_out(touch: Touch) -> Sequence[Patch]:
    """The end of an ended request's saves is recorded as given to the workers, but is missing from the metadata."""

    def change(jobs: StepJobs) -> StepJobs:
        if jobs.finished_saves:
            touch()
        return msgspec.structs.replace(jobs, finished_saves=())

    return [_hands_out(change)]


@mutant(RULE, scene=FAILING)
def failed_load_told_as_save(touch: Touch) -> Sequence[Patch]:
    """The workers get the failure of a load as the end of a save."""

    def change(jobs: StepJobs) -> StepJobs:
        if jobs.failed_loads:
            touch()
        return msgspec.structs.replace(jobs, failed_loads=(), finished_saves=(*jobs.finished_saves, *jobs.failed_loads))

    return [_hands_out(change)]


@mutant(RULE, "vllm#18246", scene=Worlds())
def report_lost(touch: Touch) -> Sequence[Patch]:
    """The connector does not record the reports in every fifth worker output that has reports."""
    num_outputs: dict[int, int] = {}

    def observe(original: Any, side: SchedulerSide, output: Any) -> None:
        worker_meta = output.kv_connector_worker_meta
        has_reports = isinstance(worker_meta, WorkerReports) and bool(worker_meta.reports)
        num_outputs[id(side)] = num_outputs.get(id(side), 0) + has_reports
        if has_reports and num_outputs[id(side)] % 5 == 0:
            touch()
            output.kv_connector_worker_meta = None
        original(side, output)
        output.kv_connector_worker_meta = worker_meta

    return [wrapped(SchedulerSide, "update_connector_output", observe)]


@mutant(RULE, "vllm#56104", scene=FAILING)
def failure_recorded_as_done(touch: Touch) -> Sequence[Patch]:
    """The connector records a failed copy as done."""

    def take(original: Any, side: SchedulerSide, output: Any) -> None:
        arrived = side._arrived
        if arrived is not None:
            if not all(report.done for report in arrived.reports):
                touch()
            done = tuple(attrs.evolve(report, done=True, error="") for report in arrived.reports)
            side._arrived = attrs.evolve(arrived, reports=done)
        original(side, output)

    return [wrapped(SchedulerSide, "take_reports", take)]


@mutant(RULE, "LMCache#3388", scene=FailedLoads())
def load_errors_lost(touch: Touch) -> Sequence[Patch]:
    """The connector does not record which blocks were reported to vLLM as not filled."""

    def take(_original: Any, *_arguments: Any) -> None:
        touch()

    return [wrapped(RequestReader, "load_errors", take)]


@mutant(RULE, "LMCache#4355", "LMCache#4762", scene=ASYNC_LOADS)
def end_of_load_not_told(touch: Touch) -> Sequence[Patch]:
    """The end of a load is recorded as reported, but vLLM does not get it and waits."""

    def end(original: Any, side: SchedulerSide, output: Any) -> None:
        before = output.finished_recving
        original(side, output)
        if output.finished_recving != before:
            touch()
            output.finished_recving = before

    return [wrapped(SchedulerSide, "end_waiting", end)]


@mutant(RULE, "vllm#43226", scene=ASYNC_LOADS)
def end_of_load_told_too_early(touch: Touch) -> Sequence[Patch]:
    """When one load ends, the connector reports all other loads in flight as ended, too."""

    def end(original: Any, side: SchedulerSide, output: Any) -> None:
        before = output.finished_recving
        original(side, output)
        waiting = [copy.request_id for copy in side.journal.owed.under_way() if copy.kind is CopyKind.LOAD]
        if output.finished_recving != before and waiting:
            touch()
            output.finished_recving = {*output.finished_recving, *waiting}

    return [wrapped(SchedulerSide, "end_waiting", end)]


@mutant(RULE, scene=ASYNC_SAVES)
def end_that_workers_told_is_forgotten(touch: Touch) -> Sequence[Patch]:
    """The connector does not record that the workers reported the end of a save to vLLM."""

    def reported(original: Any, owed: Owed, request_ids: Any) -> tuple[int, ...]:
        if original(owed, request_ids):
            touch()
        return ()

    return [wrapped(Owed, "reported_to_vllm", reported)]


@mutant(RULE, scene=LATE_IN_STEPS)
def nothing_pending(touch: Touch) -> Sequence[Patch]:
    """The connector reports to vLLM that it needs no step, though a copy is in flight."""

    def pending(original: Any, side: SchedulerSide) -> bool:
        if original(side):
            touch()
        return False

    return [wrapped(SchedulerSide, "has_pending_push_work", pending)]


@mutant(RULE, "vllm#57727", scene=RESETTING)
def reset_not_recorded(touch: Touch) -> Sequence[Patch]:
    """The connector answers a cache reset with True, but keeps the saved chunks."""

    def reset(_original: Any, _side: SchedulerSide) -> bool:
        touch()
        return True

    return [wrapped(SchedulerSide, "reset_cache", reset)]


@mutant(RULE, scene=Worlds())
def allocation_not_recorded(touch: Touch) -> Sequence[Patch]:
    """The connector does not record an allocation without a load, though the step uses the allocated blocks."""

    def observe(original: Any, journal: Journal, event: e.Event) -> Any:
        if not isinstance(event, e.BlocksAllocated) or event.num_external_tokens:
            return original(journal, event)
        touch()
        return []

    return [wrapped(Journal, "observe", observe)]


@mutant(RULE, scene=Worlds())
def second_arrival_not_recorded(touch: Touch) -> Sequence[Patch]:
    """The connector does not record the arrival of every second request."""
    num_arrived: dict[int, int] = {}

    def arrive(original: Any, side: SchedulerSide, request: Any) -> None:
        num_arrived[id(side)] = num_arrived.get(id(side), 0) + 1
        if num_arrived[id(side)] % 2:
            original(side, request)
        else:
            touch()

    return [wrapped(SchedulerSide, "on_new_request", arrive)]


@mutant(RULE, scene=Worlds())
def answers_the_stored_hit_again(touch: Touch) -> Sequence[Patch]:
    """If a request's first lookup found nothing, the connector answers the request's later lookups with 0 tokens."""
    first: dict[tuple[int, str], tuple[int | None, bool]] = {}

    def change(side: SchedulerSide, request: Any, answer: tuple[int | None, bool]) -> tuple[int | None, bool]:
        before = first.setdefault((id(side), request.request_id), answer)
        if before != (0, False) or not answer[0]:
            return answer
        touch()
        return before

    return [_answers(change)]


def _gives(change: Callable[[Any], None]) -> Patch:
    """Patch that passes what a worker reports to vLLM through `change(results)`."""

    def results(original: Any, connector: KVLedgerConnector) -> Any:
        found = original(connector)
        change(found)
        return found

    return wrapped(KVLedgerConnector, "_transfer_results", results)


@mutant(RULE, "LMCache#4762", scene=ASYNC_SAVES)
def end_of_save_not_given(touch: Touch) -> Sequence[Patch]:
    """A worker does not report the end of a save to vLLM, so vLLM keeps the blocks forever."""

    def change(results: Any) -> None:
        if results.finished_sending:
            touch()
            results.finished_sending = set()

    return [_gives(change)]


@mutant(RULE, "vllm#56104", scene=FAILING)
def failed_load_given_as_good(touch: Touch) -> Sequence[Patch]:
    """A worker reports to vLLM that a failed load has ended, but not that it failed."""

    def change(results: Any) -> None:
        if results.failed_recving:
            touch()
            results.failed_recving = set()

    return [_gives(change)]


@mutant(RULE, "LMCache#3388", scene=FailedLoads())
def load_errors_of_good_loads(touch: Touch) -> Sequence[Patch]:
    """A worker reports the blocks of successful loads as not filled, instead of the blocks of failed loads."""

    def take(original: Any, side: WorkerSide) -> set[int]:
        failed: set[int] = original(side)
        if not failed or side._step is None:
            return failed
        touch()
        return {block_id for job in side._step.loads for block_id in job.block_ids} - failed

    return [wrapped(WorkerSide, "take_failed_block_ids", take)]


@mutant(RULE, scene=FailedLoads())
def load_errors_told_again(touch: Touch) -> Sequence[Patch]:
    """A worker reports the blocks of a failed load in every later step, so vLLM recomputes them forever."""
    failed: dict[int, set[int]] = {}

    def take(original: Any, side: WorkerSide) -> set[int]:
        before = failed.setdefault(id(side), set())
        found: set[int] = original(side)
        if not before <= found:
            touch()
        before |= found
        return set(before)

    return [wrapped(WorkerSide, "take_failed_block_ids", take)]


@mutant(RULE, scene=SYNC_LOADS)
def load_errors_of_no_failure(touch: Touch) -> Sequence[Patch]:
    """A worker reports the blocks of all loads of a step as not filled, though none failed."""

    def take(original: Any, side: WorkerSide) -> set[int]:
        failed: set[int] = original(side)
        if failed or side._bound is None or not side._bound.loads:
            return failed
        touch()
        return {block_id for job in side._bound.loads for block_id in job.block_ids}

    return [wrapped(WorkerSide, "take_failed_block_ids", take)]


@mutant(RULE, scene=Worlds())
def waits_for_blocks_that_nobody_keeps(touch: Touch) -> Sequence[Patch]:
    """`has_pending_block_frees` always returns True, so vLLM waits for blocks instead of preempting a request."""

    def pending(original: Any, side: SchedulerSide) -> bool:
        if not original(side):
            touch()
        return True

    return [wrapped(SchedulerSide, "has_pending_block_frees", pending)]
