"""Scheduler and workers in processes of their own: metadata and reports travel between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from e2e.engines import Reference, read_sound_log
from kvledger.adapters.demo.workload import Workload
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.vllm


def generate(model: Path, log_dir: Path | str, workload: Workload, num_ranks: int = 1) -> list[list[int]]:
    """The outputs of an engine whose scheduler and workers are processes of their own."""
    script = Path(__file__).with_name("separate_processes.py")
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if num_ranks > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
            str(core % (os.cpu_count() or 1)) for core in range(num_ranks)
        )
    result = subprocess.run(
        [sys.executable, script, model, log_dir, json.dumps(attrs.asdict(workload)), str(num_ranks)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    outputs: list[list[int]] = json.loads(result.stdout.splitlines()[-1])
    return outputs


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


def test_two_ranks_each_keep_their_part_of_a_page(model: Path, tmp_path: Path) -> None:
    """Tensor parallel 2 with two real workers: a job counts when both have reported, outputs are those of two ranks
    without a connector, and nothing is computed again.
    """
    workload = Workload(seed=2, chunk_size=32)
    outputs = generate(model, tmp_path, workload, num_ranks=2)
    assert outputs == generate(model, "-", workload, num_ranks=2)
    (log_path,) = tmp_path.iterdir()
    log = read_sound_log(log_path)
    assert log.figures.num_tokens_recovered > 0
    assert log.figures.num_tokens_recomputed == 0
    assert {event.ranks_done for event in log.of_type(e.TransferReported)} == {(0, 1)}
