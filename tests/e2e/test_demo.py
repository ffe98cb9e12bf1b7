"""`make demo`: it shows a recovery, and says so when there is none."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import finished

from e2e.engines import read_sound_log
from kvledger.adapters.figures import Figures
from kvledger.adapters.lab.demo.__main__ import failures_of
from kvledger.adapters.lab.demo.recompute_counter import RecomputeCounter

DEMO = [sys.executable, "-m", "kvledger.adapters.lab.demo"]
GOOD = {
    "logged": Figures(num_preemptions=2, num_tokens_recovered=96, num_tokens_recomputed=4),
    "measured": RecomputeCounter(num_preemptions=2, num_tokens_lost=100, num_tokens_recomputed=4),
    "outputs_equal": True,
    "verify_exit_code": 0,
}


@pytest.mark.vllm
def test_the_demo_shows_a_preempted_request_that_recovers(model: Path, tmp_path: Path) -> None:
    """The timeline of the request and the figures are on stdout, the figures in a file as well; the log is sound."""
    (tmp_path / "model").symlink_to(model)
    result = finished([*DEMO, "--directory", tmp_path])
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failures"] == []
    logged, ours, plain = report["logged"], report["with_connector"], report["without_connector"]
    assert logged["num_tokens_recovered"] > 1000
    assert logged["num_tokens_retained"] == 0
    assert logged["num_tokens_recomputed"] == ours["num_tokens_recomputed"] < plain["num_tokens_recomputed"] / 10
    assert "preempted → recovering" in result.stdout
    assert f"recovered    {logged['num_tokens_recovered']:>6}" in result.stdout
    assert read_sound_log(Path(report["log_path"])).figures.num_tokens_recovered == logged["num_tokens_recovered"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"logged": Figures()}, "no request was preempted"),
        ({"logged": Figures(num_preemptions=2, num_tokens_recomputed=4)}, "no token was recovered"),
        ({"outputs_equal": False}, "outputs differ"),
        ({"verify_exit_code": 1}, "`kvledger verify` exited with 1"),
        ({"measured": RecomputeCounter(num_preemptions=2, num_tokens_recomputed=5)}, "num_tokens_recomputed is 4"),
    ],
)
def test_a_demo_that_shows_nothing_or_something_wrong_fails_with_the_reason(
    change: dict[str, Any], reason: str
) -> None:
    """Each reason is named; a good run has none."""
    assert failures_of(**GOOD) == []
    assert reason in failures_of(**{**GOOD, **change})[0]
