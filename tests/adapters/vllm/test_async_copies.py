"""A worker's asynchronous copies, with the engine that really copies: begun, reported once, and again if asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from sim.slow_copies import delay
from vllm.distributed.kv_transfer import kv_transfer_state

from kvledger.adapters.vllm import async_copies, versions
from kvledger.adapters.vllm.async_copies import AsyncCopies
from kvledger.adapters.vllm.metadata import JobReport
from kvledger.lifecycle import events as e
from kvledger.storage.kv import CopyEngine, CopyResult, HostPool, describe_blocks, make_copy_engine
from kvledger.storage.kv.errors import CopyRefused

pytestmark = pytest.mark.scheduler

NUM_BLOCKS = 8


@attrs.frozen
class Bench:
    """KV of one layer, a pool, an engine over both, and the copies under test."""

    kv: torch.Tensor
    pool: HostPool
    engine: CopyEngine
    copies: AsyncCopies


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Blocks that all differ."""
    kv = torch.arange(NUM_BLOCKS * 32, dtype=torch.int64).reshape(NUM_BLOCKS, 1, 16, 2).contiguous()
    layout = describe_blocks({"layer": kv}, num_blocks=NUM_BLOCKS)
    pool = HostPool(NUM_BLOCKS, layout.block_bytes, pin=False)
    engine = make_copy_engine(layout, pool, is_async=True)
    yield Bench(kv, pool, engine, AsyncCopies(rank=3))
    engine.close()
    pool.close()


class Gate:
    """A copy that is done when the gate is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def open(self) -> None:
        """Let it be done."""
        self._open.set()

    def done(self) -> bool:
        """Whether the gate is open."""
        return self._open.is_set()

    def precede(self) -> None:
        """Wait for whoever opens it."""
        self._open.wait()

    def result(self) -> CopyResult:
        """Wait for whoever opens it."""
        self._open.wait()
        return CopyResult(num_pages=1, num_bytes=7, duration_ns=1)


def test_a_copy_is_made_and_reported_with_rank_and_figures(bench: Bench) -> None:
    """Out into the pool, the blocks overwritten, and back."""
    before = bench.kv[[2, 5]].clone()
    bench.copies.start((1,), lambda: bench.engine.start_save([2, 5], [0, 1]))
    (saved,) = bench.copies.wait_for([1])
    bench.kv.zero_()
    bench.copies.start((2,), lambda: bench.engine.start_load([0, 1], [2, 5]))
    (loaded,) = bench.copies.wait_for([2])
    assert torch.equal(bench.kv[[2, 5]], before)
    for report, job_id in ((saved, 1), (loaded, 2)):
        assert (report.job_ids, report.rank, report.done, report.is_repeated) == ((job_id,), 3, True, False)
        assert report.num_bytes == before.nbytes
        assert report.error == ""


def failed_to_begin(bench: Bench, job_id: int) -> JobReport:
    """The report of a copy out of a block that does not exist."""
    with pytest.raises(CopyRefused) as caught:
        bench.copies.start((job_id,), lambda: bench.engine.start_save([NUM_BLOCKS], [0]))
    return bench.copies.failed((job_id,), caught.value)


def test_of_what_cannot_begin_nothing_pends(bench: Bench) -> None:
    """And its report says why."""
    report = failed_to_begin(bench, 1)
    assert not report.done
    assert str(NUM_BLOCKS) in report.error
    assert bench.copies.take_done() == []
    assert bench.copies.wait_for([1]) == []


def test_what_fails_on_its_way_is_reported_as_failed(bench: Bench) -> None:
    """The pool is closed under a copy that has begun: no call raises, and the worker lives."""

    class Failing:
        """A copy whose future holds what the real engine's would."""

        def done(self) -> bool:
            return True

        def result(self) -> CopyResult:
            bench.pool.close()
            return bench.engine.start_save([0], [0]).result()

    bench.copies.start((1,), Failing)
    (report,) = bench.copies.take_done()
    assert not report.done
    assert "PoolClosed" in report.error
    assert bench.copies.take_done() == []


def test_copies_are_taken_when_they_are_done_in_any_order_and_each_once() -> None:
    """Asking for those that are done waits for nobody."""
    copies, gates = AsyncCopies(rank=0), [Gate(), Gate(), Gate()]
    for job_id, gate in enumerate(gates):
        copies.start((job_id,), lambda gate=gate: gate)  # type: ignore[misc]
    assert copies.take_done() == []
    gates[1].open()
    assert [report.job_ids for report in copies.take_done()] == [(1,)]
    assert copies.take_done() == []
    gates[0].open()
    gates[2].open()
    assert [report.job_ids for report in copies.take_done()] == [(0,), (2,)]


def test_waiting_for_some_leaves_the_others_pending() -> None:
    """Only what a step may overwrite holds it up."""
    copies, mine, other = AsyncCopies(rank=0), Gate(), Gate()
    copies.start((1,), lambda: mine)
    copies.start((2,), lambda: other)
    opener = threading.Timer(0.01, mine.open)
    opener.start()
    assert [report.job_ids for report in copies.wait_for([1])] == [(1,)]
    opener.join()
    assert copies.take_done() == []
    other.open()
    assert [report.job_ids for report in copies.take_done()] == [(2,)]


def test_waiting_for_what_is_over_or_was_never_begun_is_no_report() -> None:
    """It was reported before, or will not be here."""
    copies, gate = AsyncCopies(rank=0), Gate()
    gate.open()
    copies.start((1,), lambda: gate)
    copies.take_done()
    assert copies.wait_for([1, 99]) == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_report_is_repeated_as_it_was(bench: Bench, fails: bool) -> None:
    """Marked as repeated, so that nobody takes it for a second end."""
    if fails:
        first = failed_to_begin(bench, 1)
    else:
        bench.copies.start((1,), lambda: bench.engine.start_save([0], [0]))
        (first,) = bench.copies.wait_for([1])
    assert bench.copies.report_again([1]) == [attrs.evolve(first, is_repeated=True)]
    assert bench.copies.report_again([1]) == [attrs.evolve(first, is_repeated=True)]


def test_jobs_that_were_copied_at_once_are_reported_together_and_again_each_for_itself(bench: Bench) -> None:
    """Who waits for one of them waits for all; a report may be lost for one."""
    bench.copies.start((1, 2), lambda: bench.engine.start_save([2, 3], [0, 1]))
    (report,) = bench.copies.wait_for([2])
    assert (report.job_ids, report.done) == ((1, 2), True)
    assert bench.copies.wait_for([1]) == []
    share = report.num_bytes // 2
    assert bench.copies.report_again([2, 1]) == [
        attrs.evolve(report, job_ids=(job_id,), num_bytes=share, is_repeated=True) for job_id in (2, 1)
    ]


def test_what_still_runs_is_waited_for_when_it_is_asked_after() -> None:
    """Nobody may give up on a copy that writes. It is a first report."""
    copies, gate = AsyncCopies(rank=0), Gate()
    copies.start((1,), lambda: gate)
    opener = threading.Timer(0.01, gate.open)
    opener.start()
    (report,) = copies.report_again([1])
    opener.join()
    assert (report.done, report.is_repeated) == (True, False)
    assert copies.take_done() == []


def test_what_nobody_knows_is_reported_as_failed() -> None:
    """A worker that was started again has no memory; its answer ends the waiting."""
    (report,) = AsyncCopies(rank=0).report_again([7])
    assert (report.job_ids, report.done, report.is_repeated) == ((7,), False, True)
    assert "does not know this job" in report.error


def test_only_the_latest_reports_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker runs for months; whoever asks does so within a few steps."""
    monkeypatch.setattr(async_copies, "MAX_REMEMBERED", 2)
    copies = AsyncCopies(rank=0)
    for job_id in (1, 2, 3):
        gate = Gate()
        gate.open()
        copies.start((job_id,), lambda gate=gate: gate)  # type: ignore[misc]
        copies.take_done()
    assert [report.done for report in copies.report_again([1, 2, 3])] == [False, True, True]


def test_a_step_that_computes_nothing_gives_way_to_copies_and_no_other_does(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop of such steps would keep the interpreter from the thread that copies."""
    engine = make_engine(num_blocks=30, chunk_size=16, enable_prefix_caching=False, load_mode="async")
    engine.serve("writer", range(64), 4)
    gave_way: list[int] = []
    monkeypatch.setattr(
        AsyncCopies, "give_way", lambda _: gave_way.append(engine.logged(e.StepScheduled)[-1].num_scheduled_tokens)
    )
    delay(engine, 5)
    engine.serve("reader", [*range(64), 99], 4)
    assert engine.logged(e.LoadCompleted, request_id="reader")
    assert len(gave_way) >= 5
    assert set(gave_way) == {0}


def test_where_nothing_is_pending_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that only waits for requests is as quick as without a connector."""
    slept: list[float] = []
    monkeypatch.setattr(async_copies, "time", SimpleNamespace(sleep=slept.append))
    copies, gate = AsyncCopies(rank=0), Gate()
    copies.give_way()
    assert slept == []
    copies.start((1,), lambda: gate)
    copies.give_way()
    assert slept == [async_copies.IDLE_WAIT_S]


class Ordered(Gate):
    """A copy that a device has in its order: what follows comes after it, and when it is done is known later."""

    def __init__(self) -> None:
        super().__init__()
        self.is_in_order = False

    def precede(self) -> None:
        """Wait for nobody."""
        self.is_in_order = True


def test_a_copy_that_a_step_needs_is_put_in_order_and_reported_when_it_is_done() -> None:
    """Nobody waits, neither for one that begins in this step nor for one that began earlier."""
    copies, needed, earlier = AsyncCopies(rank=0), Ordered(), Ordered()
    copies.start((1,), lambda: needed)
    copies.start((2, 3), lambda: earlier)
    assert copies.precede([1]) == []
    assert copies.precede([2, 3, 99]) == []
    assert needed.is_in_order
    assert earlier.is_in_order
    assert copies.take_done() == []
    earlier.open()
    assert [report.job_ids for report in copies.take_done()] == [(2, 3)]
    needed.open()
    assert [report.job_ids for report in copies.take_done()] == [(1,)]


def test_where_others_write_blocks_in_an_order_of_their_own_a_needed_copy_is_waited_for() -> None:
    """The device's order binds nobody who does not use it."""
    copies, needed = AsyncCopies(rank=0, waits=True), Ordered()
    opener = threading.Timer(0.01, needed.open)
    opener.start()
    copies.start((1,), lambda: needed)
    (report,) = copies.precede([1])
    opener.join()
    assert report.done
    assert not needed.is_in_order


@pytest.mark.parametrize("is_held", [False, True])
def test_a_connector_that_another_one_holds_is_not_alone(is_held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's worker has one connector, which may be a `MultiConnector` with others next to ours."""
    ours = object()
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", object() if is_held else ours)
    assert versions.is_alone(ours) is not is_held


class LateCopies:
    """An engine whose copies are in order at once, and seen to be done when they have been asked about three times."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine

    def start_save(self, block_ids: Any, slots: Any) -> LateCopy:
        """Device to host."""
        return LateCopy(self._engine.start_save(block_ids, slots).result())

    def start_load(self, slots: Any, block_ids: Any) -> LateCopy:
        """Host to device."""
        return LateCopy(self._engine.start_load(slots, block_ids).result())

    def close(self) -> None:
        """Close the wrapped engine."""
        self._engine.close()


class LateCopy:
    """See `LateCopies`."""

    def __init__(self, result: CopyResult) -> None:
        self._result = result
        self._num_questions = 3

    def precede(self) -> None:
        """It does."""

    def done(self) -> bool:
        """Whether it was asked often enough."""
        self._num_questions -= 1
        return self._num_questions < 0

    def result(self) -> CopyResult:
        """It is never waited for."""
        assert self._num_questions < 0
        return self._result


def test_what_a_device_reports_late_is_there_for_the_next_request(make_engine: Any) -> None:
    """The last save goes out when no request is left: the engine goes on until it is reported."""
    engine = make_engine(num_blocks=30, chunk_size=16, enable_prefix_caching=False, load_mode="sync", save_mode="sync")
    side = engine.worker._worker_side
    side._engine = LateCopies(side._engine)
    engine.serve("writer", range(61), 4)
    engine.serve("reader", [*range(61), 99], 4)
    (load,) = engine.logged(e.LoadIssued, request_id="reader")
    assert load.num_tokens == 48
    assert engine.logged(e.LoadCompleted, request_id="reader")
