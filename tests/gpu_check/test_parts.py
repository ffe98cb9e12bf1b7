"""What `make gpu-check` does on a GPU is done here on CPU tensors, small: each part looks, and sees what is wrong."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from processes import finished

from gpu_check import contents
from gpu_check.children import passed, run_tests
from gpu_check.contents import layouts, poisoned, race
from gpu_check.costs import bandwidth, gap, large_pool
from gpu_check.machine import Machine
from gpu_check.parts import PARTS
from gpu_check.report import Found, Lacking, Part, run_parts, summary
from kvledger.storage.kv.cpu import CpuCopyEngine

RUN = Path(__file__).with_name("run.py")
REHEARSED = (layouts, race, poisoned, bandwidth, large_pool, gap)


def outcome(look: object) -> tuple[str, str]:
    """How a part ends, and why."""
    (report,) = run_parts([Part("part", "what it shows", look)], Machine.rehearsal(), lambda _line: None)  # type: ignore[arg-type]
    return report.outcome, report.reason


@pytest.mark.parametrize("look", REHEARSED, ids=lambda look: look.__name__)
def test_a_part_looks_at_something_and_finds_cpu_copies_right(look: object) -> None:
    """With figures that JSON can hold."""
    (report,) = run_parts([Part("part", "", look)], Machine.rehearsal(), lambda _line: None)  # type: ignore[arg-type]
    assert report.outcome == "ran", report.reason
    assert report.num_checks > 0
    json.dumps(report.figures)


def test_a_part_that_checks_nothing_has_failed() -> None:
    """However well it went."""
    assert outcome(lambda _machine: Found(0, {"speed": 1})) == ("failed", "it checked nothing")


def test_what_a_machine_lacks_is_a_reason_and_no_failure() -> None:
    """The other parts run, and the last line names both."""

    def lacks(_machine: Machine) -> Found:
        raise Lacking("no sanitizer")

    def breaks(_machine: Machine) -> Found:
        raise AssertionError("slot 3 differs")

    parts = [Part("a", "", lacks), Part("b", "", breaks), Part("c", "", lambda _machine: Found(1))]
    reports = run_parts(parts, Machine.rehearsal(), lambda _line: None)
    assert [report.outcome for report in reports] == ["skipped", "failed", "ran"]
    assert summary(reports) == "1 ran, 1 failed, 1 skipped: b (AssertionError: slot 3 differs); a (no sanitizer)"


def test_the_race_fails_where_the_fence_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is overwritten while its copy is held back is seen to be lost."""
    monkeypatch.setattr(contents, "fence", lambda *_: None)
    how, why = outcome(race)
    assert how == "failed"
    assert "the fence did not hold" in why


def test_the_race_fails_where_it_is_won_without_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would show nothing."""
    monkeypatch.setattr(Machine, "held_back", lambda _machine, _engine: nullcontext(lambda: None))
    monkeypatch.setattr(contents, "engines", lambda layout, pool: {"in time": CpuCopyEngine(layout, pool)})
    how, why = outcome(race)
    assert how == "failed"
    assert "won without a fence" in why


@pytest.mark.parametrize("look", [layouts, poisoned, large_pool], ids=lambda look: look.__name__)
def test_a_part_fails_where_loads_bring_nothing(look: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a stream was not waited for."""
    start_load, calls = CpuCopyEngine.start_load, []

    def first_only(engine: CpuCopyEngine, slots: object, block_ids: object) -> object:
        calls.append(slots)
        return start_load(engine, slots, block_ids) if len(calls) == 1 else start_load(engine, [], [])  # type: ignore[arg-type]

    monkeypatch.setattr(CpuCopyEngine, "start_load", first_only)
    assert outcome(look)[0] == "failed"


def test_a_run_of_tests_counts_what_passed_and_fails_where_nothing_did(tmp_path: Path) -> None:
    """One that is skipped has not passed."""
    good, skips = tmp_path / "test_good.py", tmp_path / "test_skips.py"
    good.write_text("def test_one(cuda): pass\ndef test_two(cuda): pass\n")
    skips.write_text("import pytest\ndef test_one(): pytest.skip('no vLLM')\n")
    assert run_tests([good, skips]).num_checks == 2
    with pytest.raises(AssertionError, match="of 1 tests 1 were skipped"):
        run_tests([skips])


def test_a_report_with_a_failure_has_not_passed(tmp_path: Path) -> None:
    """Whatever else passed."""
    report = tmp_path / "junit.xml"
    report.write_text('<testsuites><testsuite tests="5" failures="1" errors="0" skipped="0"/></testsuites>')
    with pytest.raises(AssertionError, match="1 of 5 tests failed"):
        passed(report)


def test_without_a_device_one_line_says_that_nothing_was_measured(tmp_path: Path) -> None:
    """And no report is written that somebody could take for one."""
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    report = tmp_path / "report.json"
    child = finished([sys.executable, RUN, "--report", report])
    assert child.returncode == 0
    (line,) = child.stdout.splitlines()
    assert "nothing measured" in line
    assert not report.exists()


def test_a_python_that_lacks_what_every_part_needs_is_told_what(tmp_path: Path) -> None:
    """A bare interpreter, without site-packages."""
    child = finished([sys.executable, "-S", "-I", RUN], cwd=tmp_path, env={"PATH": os.environ["PATH"]})
    assert child.returncode == 2
    assert "has no torch, pytest, attrs" in child.stdout


def test_the_parts_have_names_to_choose_them_by() -> None:
    """`--only` with another name says which there are."""
    child = finished([sys.executable, RUN, "--only", "race,nonsense"])
    assert child.returncode == 2
    assert f"no part nonsense; the parts are {', '.join(part.name for part in PARTS)}" in child.stdout
