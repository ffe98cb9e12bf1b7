"""Scheduler and workers in processes of their own: metadata and reports travel between them."""

from __future__ import annotations

import json
import os
import sys
from itertools import product
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import attrs
import pytest
from processes import finished

from e2e.engines import Reference, read_sound_log
from e2e.latent import YARN, make_latent_model
from kvledger.adapters.lab.demo.workload import Workload
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.vllm


def generate(
    model: Path, log_dir: Path | str, workload: Workload, num_ranks: int = 1, **extra_config: Any
) -> list[list[int]]:
    """The outputs of an engine whose scheduler and workers are processes of their own."""
    result = run(model, log_dir, workload, num_ranks, extra_config)
    assert result.returncode == 0, result.stderr[-3000:]
    outputs: list[list[int]] = json.loads(result.stdout.splitlines()[-1])
    return outputs


def run(
    model: Path, log_dir: Path | str, workload: Workload, num_ranks: int, extra_config: dict[str, Any]
) -> CompletedProcess[str]:
    """Start such an engine and let it generate, if it starts."""
    script = Path(__file__).with_name("separate_processes.py")
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PYTHONPATH": str(script.parent.parent),  # for connectors of the tests
    }
    if num_ranks > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
            str(core % (os.cpu_count() or 1)) for core in range(num_ranks)
        )
    return finished(
        [
            sys.executable,
            script,
            model,
            log_dir,
            json.dumps(attrs.asdict(workload)),
            str(num_ranks),
            json.dumps(extra_config),
        ],
        env=environment,
    )


@pytest.mark.long  # two processes that import vLLM; the server of test_serving.py is two such processes as well
def test_an_engine_in_processes_of_its_own_recovers_and_closes_its_log(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    """Outputs are equal, preempted requests recover, and the log has its last word."""
    workload = Workload(seed=1, chunk_size=16)
    assert generate(model, tmp_path, workload) == reference(workload.prompts(), workload.max_tokens)
    (log_path,) = tmp_path.iterdir()
    log = read_sound_log(log_path)
    assert log.num_requests_left == 0
    assert log.figures.num_tokens_recovered > 0
    assert log.of_type(e.LogNote)[-1].text == "connector shut down"


TWO_RANKS = Workload(seed=2, chunk_size=32)


@pytest.fixture(scope="module")
def outputs_of_two_ranks(model: Path) -> list[list[int]]:
    """What two ranks say without a connector."""
    return generate(model, "-", TWO_RANKS, num_ranks=2)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_two_ranks_each_keep_their_part_of_a_page(
    mode: str, model: Path, outputs_of_two_ranks: list[list[int]], tmp_path: Path
) -> None:
    """Tensor parallel 2 with two real workers, copies within the steps or beside them: a job counts when both have
    reported, outputs are those of two ranks without a connector, and nothing is computed again.
    """
    outputs = generate(model, tmp_path, TWO_RANKS, num_ranks=2, load_mode=mode, save_mode=mode)
    assert outputs == outputs_of_two_ranks
    (log_path,) = tmp_path.iterdir()
    log = read_sound_log(log_path)
    assert log.figures.num_tokens_recovered > 0
    assert log.figures.num_tokens_recomputed == 0
    assert {load.is_async for load in log.of_type(e.LoadIssued)} == {mode == "async"}
    reported: dict[int, list[int]] = {}
    for report in log.of_type(e.TransferReported):
        for job_id in report.job_ids:
            reported.setdefault(job_id, []).extend(report.ranks_done)
    settled = {event.job_id for kind in (e.LoadCompleted, e.SaveCompleted) for event in log.of_type(kind)}
    assert settled
    assert all(sorted(reported[job_id]) == [0, 1] for job_id in settled)


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek."""
    return make_latent_model(tmp_path_factory.mktemp("model") / "tiny-deepseek", rope_parameters=YARN)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_two_ranks_keep_the_same_latent_vectors_once(mode: str, latent_model: Path, tmp_path: Path) -> None:
    """Two real workers share a pool: a save is written once, a load comes to both, and the digests say that each was
    given what it had itself. Outputs are not compared: two runs without a connector differ, with two ranks on CPU.

    On a CPU with AMX, vLLM would choose AMX_MLA, which refuses the float32 weights of this model.
    """
    workload = Workload(seed=2, block_size=16, chunk_size=16, num_blocks=64)
    modes = {"load_mode": mode, "save_mode": mode}
    serving = {"kv_connector": "ContinuingConnector", "kv_connector_module_path": "e2e.latent"}
    engine = {"replaced_connector": serving, "engine_arguments": {"attention_backend": "CPU_MLA"}}
    generate(latent_model, tmp_path, workload, num_ranks=2, digests="all", **engine, **modes)
    (log_path,) = tmp_path.iterdir()
    log = read_sound_log(log_path)
    assert log.figures.num_tokens_recovered > 0
    assert log.figures.num_tokens_recomputed == 0
    digested = {(event.rank, event.is_load) for event in log.of_type(e.PagesDigested)}
    assert digested == set(product((0, 1), (False, True)))
    block_bytes = 2 * 16 * (512 + 64) * 4
    saved = [slot for kind in (e.SaveIssued, e.TailSaveIssued) for job in log.of_type(kind) for slot in job.slots]
    assert log.figures.num_bytes_saved == len(saved) * block_bytes
    loaded = [slot for load in log.of_type(e.LoadIssued) for slot in load.slots]
    assert log.figures.num_bytes_loaded == 2 * len(loaded) * block_bytes


@pytest.mark.long
def test_a_start_in_which_a_worker_has_fewer_slots_is_refused(model: Path, tmp_path: Path) -> None:
    """No request is served; the output names the rank and both figures, and the log is closed."""
    disagreeing = {"kv_connector": "DisagreeingConnector", "kv_connector_module_path": "e2e.disagreeing"}
    result = run(model, tmp_path, TWO_RANKS, 1, {"replaced_connector": disagreeing})
    assert result.returncode != 0
    assert "ConfigurationError: rank 0 has a host pool of" in result.stdout + result.stderr
    assert "start all processes of the engine with the same versions" in result.stdout + result.stderr
    (log_path,) = tmp_path.iterdir()
    assert read_sound_log(log_path).of_type(e.LogNote)[-1].text == "connector shut down"


@pytest.mark.long
def test_more_memory_than_there_is_is_refused(model: Path, tmp_path: Path) -> None:
    """By the worker, before it takes any; the output says what to write instead."""
    result = run(model, tmp_path, TWO_RANKS, 1, {"host_bytes": "64TiB"})
    assert result.returncode != 0
    assert "host_bytes: '64TiB': asks for" in result.stdout + result.stderr
    assert 'GiB" or less, or give the process more memory' in result.stdout + result.stderr
