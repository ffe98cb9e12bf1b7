"""`kvledger conformance`: its report, its exit codes, and what it says where a connector cannot be run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kvledger.adapters.lab.conformance import runs

pytestmark = pytest.mark.scheduler

ONE_RUN = ("--seeds", "0", "--only", "a plain prompt, each lookup asked twice")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, with the small connector at hand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "lab/conformance")


def test_a_broken_obligation_is_reported_with_its_run_and_its_log(run: Any) -> None:
    """The line that plays it again does, and the log is one for the other commands."""
    mistake = ("--extra-config", '{"mistake": "writes into the output"}')
    result = run("conformance", "small_cache:SmallCache", *mistake, *ONE_RUN)
    assert result.exit_code == 1
    assert "broken      metadata-leaves-the-output (build_connector_meta), in a plain prompt" in result.out
    assert "OUTPUT_UNCHANGED: the connector changed free_encoder_mm_hashes of the scheduler's output" in result.out
    assert "again: kvledger conformance small_cache:SmallCache" in result.out
    (log,) = (line.partition("kvledger show ")[2] for line in result.out.splitlines() if line.startswith("    log: "))
    assert run("verify", log).exit_code == 0


def test_nothing_broken_is_exit_code_0_and_says_what_was_not_judged(run: Any) -> None:
    """As JSON, every obligation has a line."""
    result = run("conformance", "--json", "small_cache:SmallCache", *ONE_RUN)
    assert result.exit_code == 0, result.err
    objects = result.objects()
    reasons = {each["obligation"]: each["reason"] for each in objects if each["type"] == "obligation"}
    assert reasons["hooks-do-not-raise"] == ""
    assert reasons["loaded-kv-is-right"] == "nothing was loaded"
    last = objects[-1]
    assert (last["type"], last["verdict"], last["num_runs"], last["num_broken"]) == ("conformance", "sound", 1, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("small_cache:Nobody",), "Class Nobody not found in small_cache"),
        (("elsewhere:Mine",), "elsewhere:Mine: there is no module elsewhere; put the folder that contains it on"),
        (("json.elsewhere.deep:Mine",), "there is no module json.elsewhere.deep"),
        (("small_cache:SmallCache", "--lose", "elsewhere:lose"), "elsewhere:lose: there is no module elsewhere"),
        (("Unheard",), "Unsupported connector type: Unheard"),
        (("small_cache:SmallCache", "--extra-config", "[]"), "expected a JSON object"),
        (("small_cache:SmallCache", "--only", "a tale"), "no such run; give"),
        (("SimpleCPUOffloadConnector", "--extra-config", '{"cpu_bytes_to_use": "much"}'), "cannot be started"),
    ],
)
def test_what_cannot_be_run_is_reported_and_is_wrong_usage(run: Any, arguments: tuple[str, ...], message: str) -> None:
    """With what it was given."""
    result = run("conformance", *arguments)
    assert result.exit_code == 64
    assert message in result.err


@pytest.mark.parametrize(
    ("hook", "exit_code", "message"),
    [
        ("__init__", 64, "cannot be started: SystemExit: 0"),
        ("get_num_new_matched_tokens", 1, "a hook raised SystemExit in small_cache.py"),
        ("start_load_kv", 1, "a hook raised SystemExit in small_cache.py"),
        ("shutdown", 1, "shutdown raised SystemExit in small_cache.py"),
    ],
)
def test_a_connector_that_exits_has_raised(run: Any, hook: str, exit_code: int, message: str) -> None:
    """Incident: `sys.exit()` in a hook was reported as a mistake in kvledger."""
    result = run("conformance", "small_cache:Leaves", "--extra-config", json.dumps({"leaves": hook}), *ONE_RUN)
    assert result.exit_code == exit_code, result.err
    assert message in result.out + result.err


def test_a_worker_that_cannot_run_here_leaves_the_schedulers_side(run: Any) -> None:
    """A note says why, and what is about bytes is not judged."""
    result = run(
        "conformance", "--json", "small_cache:NoWorkerHere", "--seeds", "0", "--only", "a prefix that is stored"
    )
    assert result.exit_code == 0, result.out
    (remark,) = (each["text"] for each in result.objects() if each["type"] == "remark")
    assert "the connector's worker side cannot run here (RuntimeError: no device)" in remark
    reasons = {each["obligation"]: each for each in result.objects() if each["type"] == "obligation"}
    assert reasons["loaded-kv-is-right"]["reason"] == "the connector's worker does not run here"
    assert reasons["load-is-reported-once"]["verdict"] == "kept"


def test_the_directory_of_a_broken_run_is_judged_by_its_schedulers_log(run: Any) -> None:
    """Incident: `verify RUN --newest` read the worker's log of the same run, and said sound. `repro RUN` refused it."""
    session = ("--seeds", "0", "--only", "next turn of a session")
    result = run("conformance", "--json", "OffloadingConnector", *session)
    assert result.exit_code == 1, result.err
    logs = {each["log"] for item in result.objects("obligation") for each in item["broken_in"]}  # type: ignore[attr-defined]
    directory = Path(str(logs.pop())).parent
    assert len(list(directory.glob("*-worker-*"))) == 1
    assert run("verify", directory).exit_code == run("verify", directory, "--newest").exit_code == 1
    assert run("repro", directory, "--connector", "OffloadingConnector").exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("as_json", [True, False])
def test_after_a_signal_the_report_has_the_runs_so_far(
    number: signal.Signals, as_json: bool, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: ten minutes without a line, and a timeout took all results."""
    played = runs.played

    def second_is_interrupted(each: runs.Run, *arguments: Any) -> runs.Outcome:
        if each.name != first.name:
            os.kill(os.getpid(), number)
        return played(each, *arguments)

    first = next(runs.runs(range(0)))
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(runs, "played", second_is_interrupted)
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background SIGINT is ignored
    result = run("conformance", *(["--json"] if as_json else []), "small_cache:SmallCache", "--seeds", "0")
    signal.signal(signal.SIGINT, heard)
    assert result.exit_code == 130
    assert signal.getsignal(signal.SIGTERM) == before
    num_runs = len(list(runs.runs(range(0))))
    assert result.err.splitlines()[0] == f"kvledger: run 1 of {num_runs}: {first.name}"
    assert len(result.err.splitlines()) == 2
    if as_json:
        last = result.objects()[-1]
        assert (last["verdict"], last["exit_code"], last["num_runs"]) == ("interrupted", 130, 1)
    else:
        assert f"runs        1 of {num_runs}, interrupted, " in result.out
        assert "kept        hooks-do-not-raise" in result.out
        assert f"verdict     incomplete, interrupted after 1 of {num_runs} runs: " in result.out


def test_runs_that_judge_no_obligation_are_no_verdict(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero of them broken is not "none broken"."""
    monkeypatch.setattr("kvledger.adapters.lab.conformance.runs.findings", lambda _outcomes: [])
    result = run("conformance", "small_cache:SmallCache", *ONE_RUN)
    assert result.exit_code == 5
    assert "verdict     nothing could be checked" in result.out
