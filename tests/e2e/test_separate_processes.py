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


def test_an_engine_in_processes_of_its_own_recovers_and_closes_its_log(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    """Outputs are equal, preempted requests recover, and the log has its last word."""
    workload = Workload(seed=1, chunk_size=16)
    script = Path(__file__).with_name("separate_processes.py")
    result = subprocess.run(
        [sys.executable, script, model, tmp_path, json.dumps(attrs.asdict(workload))],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads(result.stdout.splitlines()[-1]) == reference(workload.prompts(), workload.max_tokens)
    (log_path,) = tmp_path.iterdir()
    log = read_sound_log(log_path)
    assert log.num_requests_left == 0
    assert log.figures.num_tokens_recovered > 0
    assert log.of_type(e.LogNote)[-1].text == "connector shut down"
