"""A preempted request comes back with what it had: same outputs, nothing whole computed twice, a sound log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.engines import Reference, copy_nothing, keep_two_steps_in_flight, read_sound_log
from kvledger.adapters.lab.demo.engine import running_engine
from kvledger.adapters.lab.demo.workload import Workload
from kvledger.lifecycle import events as e
from kvledger.storage.kv.cpu import CpuCopyEngine

pytestmark = pytest.mark.vllm

# Workloads of one seed share their prompts, and so the reference outputs, which cost an engine to find out.
CASES = [
    Workload(seed=2, chunk_size=8, num_blocks=26),  # chunks end inside blocks: page images
    Workload(seed=2, chunk_size=16, enable_prefix_caching=True),
]
WORKLOAD = Workload(seed=1, chunk_size=32)
MORE = [
    WORKLOAD,
    Workload(seed=3, chunk_size=64, num_blocks=28),  # a chunk is two pages
    Workload(seed=1, chunk_size=32, num_blocks=26, enable_prefix_caching=True),
    Workload(seed=3, chunk_size=128, num_blocks=28, enable_prefix_caching=True),
]


def _name(workload: Workload) -> str:
    caching = "caching" if workload.enable_prefix_caching else "no-caching"
    return f"seed-{workload.seed}-chunk-{workload.chunk_size}-blocks-{workload.num_blocks}-{caching}"


@pytest.mark.parametrize(
    "workload", [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in MORE)], ids=_name
)
def test_preempted_requests_recover_and_outputs_are_those_of_an_engine_that_never_preempts(
    workload: Workload, model: Path, reference: Reference, tmp_path: Path
) -> None:
    """Outputs are equal, at most a part-filled chunk a preemption is computed twice, and log and scheduler agree."""
    expected = reference(workload.prompts(), workload.max_tokens)
    with running_engine(model, workload, tmp_path) as engine:
        assert engine.generate(workload.prompts(), workload.max_tokens) == expected
    log = read_sound_log(engine.log_path)
    assert log.num_requests_left == 0
    assert log.figures.num_requests == workload.num_requests
    assert log.figures.num_preemptions == engine.counter.num_preemptions > 0
    assert log.figures.num_tokens_recovered > 0
    assert log.figures.num_tokens_recomputed == engine.counter.num_tokens_recomputed
    assert log.figures.num_tokens_recomputed < engine.counter.num_preemptions * workload.chunk_size
    if not workload.enable_prefix_caching:
        assert log.figures.num_tokens_retained == 0
        parts = log.figures.num_tokens_recovered + log.figures.num_tokens_recomputed
        assert parts == engine.counter.num_tokens_lost


@pytest.mark.long
def test_without_a_connector_everything_lost_is_computed_again(model: Path, reference: Reference) -> None:
    """The same requests in the same pool, measured with the same meter, are what recovery is compared with."""
    workload = WORKLOAD
    with running_engine(model, workload) as engine:
        outputs = engine.generate(workload.prompts(), workload.max_tokens)
    assert outputs == reference(workload.prompts(), workload.max_tokens)
    assert engine.counter.num_preemptions > 0
    assert engine.counter.num_tokens_recomputed == engine.counter.num_tokens_lost


def test_a_load_that_copies_nothing_is_seen_in_the_outputs(
    model: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal outputs prove something only if wrong KV changes them."""
    copy_nothing(monkeypatch)
    workload = WORKLOAD
    with running_engine(model, workload, tmp_path) as engine:
        outputs = engine.generate(workload.prompts(), workload.max_tokens)
    assert read_sound_log(engine.log_path).figures.num_tokens_recovered > 0
    assert outputs != reference(workload.prompts(), workload.max_tokens)


def test_a_load_that_fails_costs_its_request_the_cache_and_nothing_else(
    model: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was promised and not delivered is recomputed by vLLM; later loads are served again."""
    start_load, failures = CpuCopyEngine.start_load, ["no such page"]

    def fail_once(engine: CpuCopyEngine, slots: Any, block_ids: Any) -> Any:
        if failures:
            raise OSError(failures.pop())
        return start_load(engine, slots, block_ids)

    monkeypatch.setattr(CpuCopyEngine, "start_load", fail_once)
    workload = WORKLOAD
    with running_engine(model, workload, tmp_path) as engine:
        outputs = engine.generate(workload.prompts(), workload.max_tokens)
    assert outputs == reference(workload.prompts(), workload.max_tokens)
    log = read_sound_log(engine.log_path)
    (failed,) = log.of_type(e.LoadFailed)
    assert "no such page" in failed.error
    assert log.of_type(e.ChunksTainted)
    assert log.of_type(e.LoadCompleted)
    assert log.num_requests_left == 0


@pytest.mark.parametrize("chunk_size", [8, pytest.param(32, marks=pytest.mark.long)])
def test_of_two_requests_that_fill_the_pool_one_preempts_the_other_and_it_loads_prompt_and_output(
    chunk_size: int, model: Path, reference: Reference, tmp_path: Path
) -> None:
    """The log tells what was lost and loaded: tokens of the prompt and of the output, all but the last one sampled."""
    workload = Workload(
        seed=7,
        num_requests=2,
        shortest_prompt=90,
        longest_prompt=100,
        max_tokens=100,
        num_blocks=11,
        chunk_size=chunk_size,
        max_model_len=256,
        max_num_seqs=2,
    )
    prompts = workload.prompts()
    expected = reference(prompts, workload.max_tokens)
    with running_engine(model, workload, tmp_path) as engine:
        assert engine.generate(prompts, workload.max_tokens) == expected
    log = read_sound_log(engine.log_path)
    first, second = (arrival.request_id for arrival in log.of_type(e.RequestArrived))
    assert not log.life_of(first, e.RequestPreempted)
    (preempted,) = log.life_of(second, e.RequestPreempted)
    assert preempted.num_settled_tokens > len(prompts[1])
    (load,) = log.life_of(second, e.LoadIssued)
    whole_chunks = preempted.num_settled_tokens // chunk_size * chunk_size
    assert load.first_token == 0
    assert whole_chunks <= load.num_tokens <= preempted.num_settled_tokens
    assert load.num_tokens > len(prompts[1])  # output too
    answer = log.life_of(second, e.LookupAnswered)[-1]
    assert answer.num_tokens == preempted.num_settled_tokens + 1  # the last sampled token was never computed
    assert answer.num_external_tokens == load.num_tokens
    assert (load.num_tokens, answer.num_tokens - load.num_tokens) in log.steps_of(second)  # only the rest is computed
    assert log.figures.num_tokens_recovered == load.num_tokens
    assert engine.counter.num_tokens_recomputed == preempted.num_settled_tokens - load.num_tokens


def test_with_two_steps_in_flight_preempted_requests_recover_as_well(
    model: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step is scheduled before the output of the one before is known."""
    workload = CASES[0]
    expected = reference(workload.prompts(), workload.max_tokens)
    keep_two_steps_in_flight(monkeypatch)
    with running_engine(model, workload, tmp_path) as engine:
        core = engine.llm.llm_engine.engine_core.engine_core
        assert type(core.scheduler).__name__ == "AsyncScheduler"
        assert core.batch_queue.maxlen == 2
        assert engine.generate(workload.prompts(), workload.max_tokens) == expected
    log = read_sound_log(engine.log_path)
    assert log.num_requests_left == 0
    assert log.figures.num_preemptions == engine.counter.num_preemptions > 0
    assert log.figures.num_tokens_recovered > 0
    assert log.figures.num_tokens_recomputed == engine.counter.num_tokens_recomputed


def test_requests_recover_where_a_block_is_one_run_of_memory(
    model: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout that the operator asks for is the one that is registered, read by the model and copied.

    vLLM's CPU kernels read it, by strides, though its CPU backend does not declare it.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    declared = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
    monkeypatch.setattr(CPUAttentionBackend, "supported_kv_cache_layouts", lambda: declared)
    runs: list[int] = []
    make = CpuCopyEngine.__init__

    def noting(engine: CpuCopyEngine, layout: Any, *arguments: Any, **more: Any) -> None:
        runs.append(len(layout.runs()))
        make(engine, layout, *arguments, **more)

    monkeypatch.setattr(CpuCopyEngine, "__init__", noting)
    workload = CASES[0]
    with running_engine(model, workload, tmp_path, kv_cache_layout="BLHNC") as engine:
        outputs = engine.generate(workload.prompts(), workload.max_tokens)
    assert set(runs) == {1}
    assert outputs == reference(workload.prompts(), workload.max_tokens)
    assert read_sound_log(engine.log_path).figures.num_tokens_recovered > 0
