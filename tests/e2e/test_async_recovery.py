"""Recovery with asynchronous copies alone: same outputs, nothing computed twice, a sound log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.engines import Reference, copy_nothing, keep_two_steps_in_flight, read_sound_log
from kvledger.adapters.lab.demo.engine import running_engine, settle
from kvledger.adapters.lab.demo.workload import Workload
from kvledger.lifecycle import events as e
from kvledger.storage.kv.cpu import CpuCopyEngine

pytestmark = pytest.mark.vllm

BESIDE = {"load_mode": "async", "save_mode": "async"}
WORKLOAD = Workload(seed=1, chunk_size=32)
schedulers = pytest.mark.parametrize("async_scheduling", [False, pytest.param(True, marks=pytest.mark.long)])


@pytest.mark.parametrize(
    ("workload", "async_scheduling"),
    [
        (WORKLOAD, True),
        pytest.param(WORKLOAD, False, marks=pytest.mark.long),
        # Chunks end inside blocks: page images.
        pytest.param(Workload(seed=1, chunk_size=8, num_blocks=26), False, marks=pytest.mark.long),
        pytest.param(
            Workload(seed=1, chunk_size=64, num_blocks=26, enable_prefix_caching=True), True, marks=pytest.mark.long
        ),
    ],
)
def test_preempted_requests_recover_everything_while_others_run_on(
    workload: Workload,
    async_scheduling: bool,
    model: Path,
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool has room for all: no token is computed twice, not even those of part-filled chunks."""
    expected = reference(workload.prompts(), workload.max_tokens)
    if async_scheduling:
        keep_two_steps_in_flight(monkeypatch)
    with running_engine(model, workload, tmp_path, **BESIDE) as engine:
        scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
        assert type(scheduler).__name__ == ("AsyncScheduler" if async_scheduling else "Scheduler")
        assert engine.generate(workload.prompts(), workload.max_tokens) == expected
        settle(engine.llm)
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == workload.num_blocks - 1
    log = read_sound_log(engine.log_path)
    assert log.num_requests_left == 0
    assert log.figures.num_preemptions == engine.counter.num_preemptions > 0
    assert log.figures.num_tokens_recovered > 0
    assert log.figures.num_tokens_recomputed == engine.counter.num_tokens_recomputed == 0
    assert all(load.is_async for load in log.of_type(e.LoadIssued))
    assert any(save.is_async for save in log.of_type(e.SaveIssued))
    assert log.of_type(e.SaveFailed) == log.of_type(e.LoadFailed) == []


@pytest.mark.long
def test_a_load_beside_the_steps_that_copies_nothing_is_seen_in_the_outputs(
    model: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal outputs prove something only if wrong KV changes them."""
    copy_nothing(monkeypatch)
    with running_engine(model, WORKLOAD, tmp_path, **BESIDE) as engine:
        outputs = engine.generate(WORKLOAD.prompts(), WORKLOAD.max_tokens)
    assert read_sound_log(engine.log_path).figures.num_tokens_recovered > 0
    assert outputs != reference(WORKLOAD.prompts(), WORKLOAD.max_tokens)


@schedulers
def test_a_load_beside_the_steps_that_fails_is_computed(
    async_scheduling: bool, model: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loads fail on their way; their requests compute, and no client hears of it."""
    expected = reference(WORKLOAD.prompts(), WORKLOAD.max_tokens)
    if async_scheduling:
        keep_two_steps_in_flight(monkeypatch)
    start_load, failures = CpuCopyEngine.start_load, ["no such page", "no such page"]

    def fail_twice(engine: CpuCopyEngine, slots: Any, block_ids: Any) -> Any:
        if failures:
            raise OSError(failures.pop())
        return start_load(engine, slots, block_ids)

    monkeypatch.setattr(CpuCopyEngine, "start_load", fail_twice)
    with running_engine(model, WORKLOAD, tmp_path, **BESIDE) as engine:
        assert engine.generate(WORKLOAD.prompts(), WORKLOAD.max_tokens) == expected
        settle(engine.llm)
    log = read_sound_log(engine.log_path)
    assert ["no such page" in failed.error for failed in log.of_type(e.LoadFailed)] == [True, True]
    assert log.of_type(e.ChunksTainted)
    assert log.num_requests_left == 0
