"""What a real engine refuses and takes, however small; one engine after another; one with two connectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.engines import Reference, read_sound_log
from kvledger.adapters.lab.demo.engine import running_engine, sampling, start
from kvledger.adapters.lab.demo.recompute_counter import RecomputeCounter
from kvledger.adapters.lab.demo.workload import Workload, connector
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.vllm

WORKLOAD = Workload(num_blocks=25)


def test_prompts_that_are_refused_and_prompts_of_one_token(model: Path, reference: Reference, tmp_path: Path) -> None:
    """Refused is an empty prompt, and one that leaves no room for a token; the connector never hears of them."""
    from vllm.exceptions import VLLMValidationError

    prompts = [[7], [8, 9], list(range(10, 10 + 32)), list(range(10, 10 + 64)), [11] * 700]
    expected = {length: reference(prompts, length) for length in (40, 1)}
    with running_engine(model, WORKLOAD, tmp_path, chunk_size=8) as engine:
        for refused in ([], [5] * WORKLOAD.max_model_len, [5] * 5000):
            with pytest.raises(VLLMValidationError, match="prompt"):
                engine.generate([refused], 4)
        for _ in range(2):
            for length in (1, 40):
                assert engine.generate(prompts, length) == expected[length]
    log = read_sound_log(engine.log_path)
    assert log.figures.num_requests == 4 * len(prompts)
    assert log.figures.num_tokens_loaded > 0
    assert log.num_requests_left == 0


def test_a_pool_that_cannot_hold_one_request_is_refused_at_start(model: Path, tmp_path: Path) -> None:
    """So nobody can wait for ever for blocks that do not exist."""
    with (
        pytest.raises(ValueError, match=r"(?i)max.?(seq|model).?len"),
        running_engine(model, Workload(num_blocks=8), tmp_path),
    ):
        pass


def test_an_engine_that_is_collected_late_takes_nothing_from_the_one_that_runs(model: Path, tmp_path: Path) -> None:
    """An engine's finalizer shuts it down once more, and with it the process groups of every other one (vLLM 0.32)."""
    with running_engine(model, WORKLOAD) as first:
        first.generate([[7]], 1)
    with running_engine(model, WORKLOAD, tmp_path) as second:
        first.llm.llm_engine.engine_core.shutdown()  # what the finalizer does; when that runs is a matter of luck
        assert [len(said) for said in second.generate([[7]], 4)] == [4]


@pytest.mark.long
def test_two_ledgers_in_a_real_engine(model: Path, reference: Reference, tmp_path: Path) -> None:
    """A MultiConnector with two of ours: the first one with a hit loads, both save, both logs are sound."""
    from vllm.distributed import cleanup_dist_env_and_memory

    workload = Workload(seed=1)
    prompts = workload.prompts()
    expected = reference(prompts, workload.max_tokens)
    children = [
        connector(tmp_path / name, chunk_size=chunk_size, host_bytes=host_bytes)
        for name, chunk_size, host_bytes in (("small", 32, "1MiB"), ("large", 128, "64MiB"))
    ]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }
    llm = start(str(model), workload, transfer)
    try:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        meter = RecomputeCounter()
        meter.watch(scheduler)
        paths = [child.scheduler_side.log.directory for child in scheduler.connector.sub_connectors]
        for _ in range(2):
            requests: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = llm.generate(requests, sampling(workload.max_tokens), use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
    assert meter.num_preemptions > 0
    small, large = (read_sound_log(path) for path in paths)
    assert small.num_requests_left == large.num_requests_left == 0
    assert small.figures.num_preemptions == large.figures.num_preemptions == meter.num_preemptions
    for log in (small, large):
        assert log.figures.num_tokens_loaded > 0
        assert log.of_type(e.SaveCompleted)
