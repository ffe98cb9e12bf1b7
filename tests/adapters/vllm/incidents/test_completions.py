"""Incidents of completions: late, doubled, or of somebody who is gone.

Elsewhere:
- vllm#18246 (two children that save): `test_multi_connector.py`.
- vllm#10583, #27987, #34415 (ids used again): `test_edges.py`, `test_hook_contract.py`.
- vllm#56104, #40364 (one of several ranks fails): `tests/lifecycle/test_transfers.py`.
- LMCache#3640: `test_source_blocks.py`.

Not met here: vllm#49796 (ids that clients choose for their transfers: there are no transfers between engines).
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvledger.adapters.vllm.metadata import WorkerReports
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler


def is_nobody_loading(engine: Any) -> bool:
    """Whether vLLM waits for no load."""
    requests = engine.scheduler.requests.values()
    return all(request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS for request in requests)


def check_slots(engine: Any) -> None:
    """Every slot of the host pool is free or belongs to a chunk."""
    chunks = engine.projections.pool
    in_use = {slot for slots in chunks.state.committed.values() for slot in slots}
    assert chunks.slots.num_free == chunks.slots.num_slots - len(in_use)
    assert chunks._saving == {}


@pytest.mark.parametrize("num_steps_late", [1, 4])
def test_vllm_46014_a_request_comes_back_before_its_saves_are_reported(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str], report_late: Any, num_steps_late: int
) -> None:
    """Symptom: `assert not transfer_jobs`: admitted again with a hit while stores of it were pending (#46139)."""
    engine = make_engine(num_blocks=30, chunk_size=8, enable_prefix_caching=False, **runner, **transfers)
    # As for a producer: for a consumer vLLM keeps the blocks of steps in flight, and refuses to reset meanwhile.
    engine.scheduler.defer_block_free = False
    report_late(engine, num_steps_late)
    engine.add_crowd()
    for _ in range(3):
        for _ in range(6):
            engine.step()
        for _ in range(20):
            # While an asynchronous load is under way, vLLM refuses to reset.
            if engine.projections.jobs and is_nobody_loading(engine):
                break
            engine.step()
        assert len(engine.projections.jobs) > 0
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert len(engine.logged(e.RequestPreempted)) == 9
    assert engine.logged(e.LoadIssued)
    engine.check_outputs()
    check_slots(engine)


@pytest.mark.parametrize("num_steps_late", [3, 9])
def test_vllm_51637_a_completion_of_an_earlier_life_counts_for_that_life(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str], report_late: Any, num_steps_late: int
) -> None:
    """Symptom: counter negative, blocks leaked, livelock: the store of one life completed in the next one."""
    engine = make_engine(num_blocks=14, chunk_size=8, enable_prefix_caching=False, **runner, **transfers)
    report_late(engine, num_steps_late)
    engine.add_crowd()
    engine.run()
    issued = {save.job_id: save for save in engine.logged(e.SaveIssued, e.TailSaveIssued)}
    current: dict[str, int] = {}
    num_late = 0
    for _, event in engine.events():
        if isinstance(event, e.RequestPreempted):
            current[event.request_id] = current.get(event.request_id, 0) + 1
        elif isinstance(event, e.SaveCompleted):
            assert event.generation == issued[event.job_id].generation
            num_late += event.generation < current.get(event.request_id, 0)
    assert num_late > 0
    engine.check_outputs()
    check_slots(engine)


@pytest.mark.parametrize("num_steps_late", [0, 2])
def test_vllm_46240_a_load_and_a_save_of_an_aborted_request_land_together(
    make_engine: Any,
    runner: dict[str, bool],
    transfers: dict[str, str],
    is_async: bool,
    report_late: Any,
    num_steps_late: int,
) -> None:
    """Symptom: EngineCore assert: the first of two completions in a step deleted the request (#56089, #43226)."""
    engine = make_engine(
        num_blocks=30, chunk_size=8, max_num_batched_tokens=64, enable_prefix_caching=False, **runner, **transfers
    )
    engine.serve("writer", range(64), 4)
    report_late(engine, num_steps_late)
    engine.add("gone", [*range(64), *range(300, 340)], 20)
    for _ in range(12):
        engine.step()
        if engine.logged(e.LoadIssued) and engine.logged(e.SaveIssued, request_id="gone"):
            break
    engine.abort("gone")
    engine.drain()  # vLLM itself would hand the new life the tokens of a step still in flight
    assert ("gone" in engine.scheduler.requests) is is_async
    while "gone" in engine.scheduler.requests:  # an id whose blocks are held cannot be used again
        engine.step()
    engine.add("gone", range(700, 740), 5)  # its id is used again
    engine.run()
    jobs = {job.job_id for job in engine.logged(e.LoadIssued, e.SaveIssued, request_id="gone")}
    settled = engine.logged(e.LoadCompleted, e.SaveCompleted, request_id="gone")
    assert len(settled) == len(jobs) >= 2
    assert {done.job_id for done in settled} == jobs
    assert len(engine.outputs["gone"]) == 5
    engine.check_outputs()
    check_slots(engine)


def test_vllm_46240_a_save_of_one_life_and_a_load_of_the_next_are_reported_together(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """A request that loads asynchronously computes nothing and saves nothing, but its last life may have."""
    engine = make_engine(
        num_blocks=30, chunk_size=8, enable_prefix_caching=False, max_deferred_lookups=0, **runner, **transfers
    )
    # As for a producer: for a consumer vLLM keeps the blocks of steps in flight, and refuses to reset meanwhile.
    engine.scheduler.defer_block_free = False
    engine.serve("writer", range(64), 4)
    engine.add("gone", [*range(64), *range(300, 340)], 20)
    while not (engine.outputs["gone"] and is_nobody_loading(engine)):
        engine.step()
    side = engine.worker._worker_side
    take, kept = side.take_reports, []

    def keep() -> None:
        kept.append(take())

    side.take_reports = keep
    while not engine.projections.jobs:
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    while len(engine.logged(e.LoadIssued, request_id="gone")) < 2:
        engine.step()
    for _ in range(2):
        engine.step()
    engine.abort("gone")
    assert {job.kind for job in engine.projections.jobs} == {"save", "load"}
    reports = [report for batch in [*kept, take()] if batch for report in batch.reports]
    side.take_reports = lambda: WorkerReports(tuple(reports))
    engine.step()
    side.take_reports = take
    engine.run(max_steps=20)
    jobs = {job.job_id for job in engine.logged(e.LoadIssued, e.SaveIssued, e.TailSaveIssued, request_id="gone")}
    settled = [done.job_id for done in engine.logged(e.LoadCompleted, e.SaveCompleted, request_id="gone")]
    assert sorted(settled) == sorted(jobs)
    assert len(engine.logged(e.RequestReleased, request_id="gone")) == 1
    check_slots(engine)


@pytest.mark.parametrize("num_steps_late", [2, 6])
def test_vllm_43226_a_completion_after_the_request_is_gone_harms_nobody(
    make_engine: Any,
    runner: dict[str, bool],
    transfers: dict[str, str],
    is_async: bool,
    report_late: Any,
    num_steps_late: int,
) -> None:
    """Symptom: `assert req_id in self.requests` on a late completion (#53079, #55286, #43265, #53631, #37837)."""
    engine = make_engine(num_blocks=30, chunk_size=8, enable_prefix_caching=False, **runner, **transfers)
    report_late(engine, num_steps_late)
    engine.add("short", range(40), 2)
    engine.add("other", range(200, 240), 30)
    while "short" not in engine.finish_reasons:
        engine.step()
    assert ("short" in engine.scheduler.requests) is is_async, "vLLM keeps it only while its blocks are read"
    assert engine.projections.tracker.get("short") is not None, "the ledger remembers it until its saves are reported"
    engine.run()
    released = engine.logged(e.RequestReleased)
    assert [event.request_id for event in released] == ["short", "other"]
    engine.check_outputs()
    check_slots(engine)


def test_vllm_33377_an_abort_with_a_step_in_flight_ends_it_once(make_engine: Any, transfers: dict[str, str]) -> None:
    """Symptom: double free: the output of the step in flight ended a request that was aborted already."""
    engine = make_engine(num_blocks=14, chunk_size=8, async_scheduling=True, **transfers)
    engine.add_crowd()
    for _ in range(8):
        engine.step()
    assert engine._in_flight
    engine.abort("request 1")
    engine.update()
    engine.abort("request 1")
    engine.run()
    assert len(engine.logged(e.RequestFinished, request_id="request 1")) == 1
    assert len(engine.logged(e.RequestReleased, request_id="request 1")) == 1


def test_vllm_25067_an_abort_of_a_finished_request_is_nothing(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str], report_late: Any
) -> None:
    """Symptom: KeyError when the client went away right after its request had finished with a delayed free."""
    engine = make_engine(num_blocks=30, chunk_size=8, **runner, **transfers)
    report_late(engine, 4)
    engine.add("only", range(40), 4)
    while engine.scheduler.get_num_unfinished_requests():
        engine.step()
    engine.abort("only")
    engine.run()
    engine.abort("only")
    (finished,) = engine.logged(e.RequestFinished)
    assert finished.status == "FINISHED_LENGTH_CAPPED"


def test_aibrix_2231_reports_of_many_steps_come_in_one_batch(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """Symptom: KeyError, EngineDead: requests completed between two batches of handles that were still iterated."""
    engine = make_engine(num_blocks=14, chunk_size=8, enable_prefix_caching=False, **runner, **transfers)
    side = engine.worker._worker_side
    take, calls = side.take_reports, []

    def every_seventh() -> Any:
        calls.append(1)
        return take() if len(calls) % 7 == 0 else None

    side.take_reports = every_seventh
    engine.add_crowd()
    engine.run()
    assert engine.num_preemptions
    engine.check_outputs()
    check_slots(engine)


def test_ascend_16729_a_second_call_before_the_forward_copies_nothing(
    make_engine: Any, runner: dict[str, bool], transfers: dict[str, str]
) -> None:
    """Symptom: `handle_preemptions` came twice on the second model runner, and everything was copied twice."""
    engine = make_engine(num_blocks=14, chunk_size=8, enable_prefix_caching=False, **runner, **transfers)
    once = engine.worker.handle_preemptions

    def twice(metadata: Any) -> None:
        once(metadata)
        once(metadata)

    engine.worker.handle_preemptions = twice
    engine.add_crowd()
    engine.run()
    rescued = [save for save in engine.logged(e.SaveIssued) if save.before_forward]
    assert rescued
    reports = [job_id for report in engine.logged(e.TransferReported) for job_id in report.job_ids]
    assert len(reports) == len(set(reports))
