"""`make demo`: it shows a recovery, says so when there is none, and leaves no process behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from processes import finished, started

from e2e.engines import read_sound_log
from kvledger.adapters.demo.report import EngineFigures, Report
from kvledger.adapters.demo.workload import Workload
from kvledger.lifecycle.projections.totals import Figures

DEMO = [sys.executable, "-m", "kvledger.adapters.demo"]

GOOD = Report(
    workload=Workload(),
    vllm_version="0.32.0",
    log_path="log",
    outputs_equal=True,
    verify_exit_code=0,
    logged=Figures(num_preemptions=2, num_tokens_recovered=96, num_tokens_recomputed=4),
    with_connector=EngineFigures(num_preemptions=2, num_tokens_lost=100, num_tokens_recomputed=4, duration_s=1.0),
    without_connector=EngineFigures(num_preemptions=2, num_tokens_lost=100, num_tokens_recomputed=100, duration_s=1.0),
    duration_s=20.0,
)


@pytest.mark.vllm
def test_the_demo_shows_a_preempted_request_that_recovers(model: Path, tmp_path: Path) -> None:
    """The report is on stdout and in a file, the story of the request on stderr, and the log is sound."""
    (tmp_path / "model").symlink_to(model)
    result = finished([*DEMO, "--json", "--directory", tmp_path])
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert report["failures"] == []
    assert report["outputs_equal"]
    assert report["num_preemptions"] > 0
    assert report["num_tokens_recovered"] > 1000
    assert report["num_tokens_retained"] == 0
    recomputed = report["without_connector"]["num_tokens_recomputed"]
    assert report["num_tokens_recomputed"] == report["with_connector"]["num_tokens_recomputed"] < recomputed / 10
    assert "preempted → recovering" in result.stderr
    assert read_sound_log(Path(report["log_path"])).figures.num_tokens_recovered == report["num_tokens_recovered"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"logged": Figures()}, "nothing was preempted"),
        ({"logged": Figures(num_preemptions=2, num_tokens_recomputed=4)}, "nothing was recovered"),
        ({"outputs_equal": False}, "outputs differ"),
        ({"verify_exit_code": 1}, "`kvledger verify` ended with 1"),
        ({"with_connector": attrs.evolve(GOOD.with_connector, num_tokens_recomputed=5)}, "num_tokens_recomputed 4"),
    ],
)
def test_a_demo_that_shows_nothing_or_something_wrong_fails_with_the_reason(
    change: dict[str, Any], reason: str
) -> None:
    """Each reason is named; a good run has none."""
    assert GOOD.failures() == []
    assert reason in attrs.evolve(GOOD, **change).failures()[0]


@pytest.mark.vllm
@pytest.mark.long
def test_an_engine_that_cannot_start_fails_the_demo_with_its_last_words(tmp_path: Path) -> None:
    """A model folder that holds no model: vLLM's own words are shown, and where the rest of them stand."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    result = finished([*DEMO, "--directory", tmp_path])
    assert result.returncode == 1
    assert "demo failed: the engine ended with status 1" in result.stderr
    assert "vllm-without-connector.log" in result.stderr
    assert "Error" in result.stderr


@pytest.mark.vllm
def test_an_interrupted_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    """Ctrl-C while an engine starts ends the engine, too."""
    command = [*DEMO, "--directory", tmp_path]
    with started(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stderr is not None
        for line in demo.stderr:
            if "model made" in line:
                break
        children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
        assert children
        demo.send_signal(signal.SIGINT)
        _, said = demo.communicate()
        assert demo.returncode == 130
        assert "interrupted" in said
        assert not [child for child in children if Path(f"/proc/{child}").exists()]
