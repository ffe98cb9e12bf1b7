"""An incident becomes a test that fails with the mistake that led to it, and passes without.

The mistakes are made while an engine runs: those of the simulation in what the core decides, others in the adapter,
where they raise. A test is written of the log where the mistake is mended, and once more where it is not: then what is
not needed can be left out.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import finished
from sim.checks.rules import allowed_rules
from sim.logs import read_end
from sim.test_mutants import MUTANTS
from sim.world import World
from stored_logs import write_log

from kvledger.adapters.core import composed_core
from kvledger.adapters.lab.repro import read_recording
from kvledger.adapters.lab.repro.incidents import find_incidents
from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.tools.exit_codes import ExitCode
from kvledger.adapters.vllm import scheduler_side
from kvledger.adapters.vllm.chunk_keys import ChunkKeySource
from kvledger.adapters.vllm.observe import RequestReader, StepReader
from kvledger.lifecycle import Core, Ledger
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

TESTS = Path(__file__).parents[3]
NUM_SEEDS = 40
Patch = tuple[Any, str, Callable[..., Any]]


def _raising(owner: Any, name: str, when: Callable[..., bool]) -> Patch:
    original = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if when(*arguments, **options):
            message = "a mistake that is made on purpose"
            raise ZeroDivisionError(message)
        return original(*arguments, **options)

    return owner, name, call


OF_THE_CORE: dict[str, tuple[Patch, int]] = {
    attribute: ((owner, attribute, mutant), first_seed)
    for owner, attribute, mutant, _ in MUTANTS.values()
    for wanted, first_seed in (("save_on_finish", 0), ("_reset", 4), ("settle", 30))
    if attribute == wanted
}
"""Name -> what is replaced by what, and the first world that is tried."""

IN_THE_ADAPTER: dict[str, Patch] = {
    "keys_of_odd": _raising(ChunkKeySource, "keys", lambda _, request, *__: request.num_prompt_tokens == 33),
    "step_with_loads": _raising(
        scheduler_side, "step_jobs", lambda ready, *_: any(isinstance(job, e.LoadIssued) for job in ready.jobs)
    ),
}
"""Name -> a function of the adapter that raises for some requests, and when."""

BEFORE_ANYTHING_IS_RECORDED: dict[str, Patch] = {
    "step_of_resumed": _raising(
        StepReader,
        "_advanced",
        lambda self, counts, _: any(
            self._requests[request_id].num_preemptions > 0 and num_computed_tokens > 0
            for request_id, num_computed_tokens in counts
        ),
    ),
    "keys_of_preempted": _raising(RequestReader, "keys", lambda _, request: request.num_preemptions > 0),
    "end_of_long": _raising(RequestReader, "num_written_tokens", lambda *arguments: arguments[-1] > 80),
    "odd_arrival": _raising(
        Ledger, "observe", lambda _, event: isinstance(event, e.RequestArrived) and event.num_prompt_tokens == 33
    ),
}
"""The same, where the log has nothing of the call but that it failed."""


def world_with(patch: Patch, first_seed: int) -> tuple[Any, str]:
    """The log of the first world that breaks a rule because of the mistake, and whose request it was."""
    for seed in range(first_seed, first_seed + NUM_SEEDS):
        with pytest.MonkeyPatch.context() as mistaken, World(seed) as world:
            mistaken.setattr(*patch)
            try:
                world.run()
                log = world.log
            except AssertionError:  # wrong KV was read: the log up to there is what an operator has
                world.side.ledger.commit()
                log = read_end(world.side)
        allowed, core = allowed_rules(world), Core.standard()
        for incident in find_incidents(log.configuration, log.events, None, core).incidents:
            whose = find_incidents(log.configuration, log.events, incident.request_id or None, core).incidents
            # What a fault of the world breaks stays broken: a test of that is another matter.
            if not any(of_request.rule in allowed for of_request in whose):
                return log, incident.request_id
    pytest.fail(f"no world breaks a rule because of {patch[1]}")


def log_of_engine(patch: Patch, directory: Path) -> Path:
    """The log of a small engine, in which the mistake makes hooks raise."""
    with pytest.MonkeyPatch.context() as mistaken:
        mistaken.setattr(*patch)
        engine = SimulatedEngine(num_blocks=14, chunk_size=8, enable_prefix_caching=False, host_bytes=1 << 20)
        for number in range(3):
            engine.add(f"request {number}", range(100 * number, 100 * number + 40), 50)
        engine.add("late", range(800, 833), 30)
        engine.run()
    side = engine.connector.scheduler_side
    side.ledger.commit()
    end = read_end(side)
    engine.shutdown()
    assert any(isinstance(event, e.HookFailed) for _, event in end.events)
    return write_log(directory, [event for _, event in end.events], end.configuration)


def run_tests(path: Path) -> None:
    """Every test of a written file."""
    for name, value in runpy.run_path(str(path)).items():
        if name.startswith("test_"):
            value()


def assert_fails_with_the_mistake_alone(path: Path, patch: Patch) -> None:
    """What is asked for is the mistake, not the recorded consequences."""
    run_tests(path)
    with pytest.MonkeyPatch.context() as mistaken:
        mistaken.setattr(*patch)
        with pytest.raises(AssertionError, match="was broken"):
            run_tests(path)


@pytest.mark.parametrize("name", OF_THE_CORE)
def test_an_incident_of_the_core_comes_back_with_the_mistake_alone(name: str, tmp_path: Path) -> None:
    """Of the whole log, and of what is left of it where it can be tried what the incident needs."""
    patch, first_seed = OF_THE_CORE[name]
    log, request_id = world_with(patch, first_seed)
    log_path = write_log(tmp_path / "log", [event for _, event in log.events], log.configuration)
    arguments = ["repro", str(log_path), *([request_id] if request_id else [])]
    whole, reduced = tmp_path / "test_whole.py", tmp_path / "test_reduced.py"
    assert main([*arguments, "--no-run", "-o", str(whole)]) == 0  # the mistake is in this process alone
    with pytest.MonkeyPatch.context() as mistaken:
        mistaken.setattr(*patch)
        assert main([*arguments, "--no-run", "-o", str(reduced)]) == 0
    sizes = [len(read_recording(path.with_suffix(".kvlog")).observations) for path in (whole, reduced)]
    assert sizes[1] < sizes[0], sizes
    assert_fails_with_the_mistake_alone(whole, patch)
    assert_fails_with_the_mistake_alone(reduced, patch)
    # Outside of a test folder the linter does not know that tests assert.
    for command in (["format", "--check"], ["check", "--ignore", "S101,INP001"]):
        options = ["--config", str(TESTS.parent / "pyproject.toml"), "--no-cache"]
        ended = finished([sys.executable, "-m", "ruff", *command, *options, str(whole), str(reduced)])
        assert ended.returncode == 0 or "No module named ruff" in ended.stderr, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", IN_THE_ADAPTER)
def test_a_hook_that_failed_fails_again_with_the_mistake_alone(name: str, tmp_path: Path) -> None:
    """It recorded what the call was about, before or after."""
    patch = IN_THE_ADAPTER[name]
    path = tmp_path / "test_hook.py"
    assert main(["repro", str(log_of_engine(patch, tmp_path / "log")), "--no-run", "-o", str(path)]) == 0
    assert_fails_with_the_mistake_alone(path, patch)


@pytest.mark.parametrize("name", BEFORE_ANYTHING_IS_RECORDED)
def test_a_call_of_which_nothing_was_recorded_is_not_guessed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is quoted instead, and where it was raised."""
    log = log_of_engine(BEFORE_ANYTHING_IS_RECORDED[name], tmp_path / "log")
    assert main(["repro", str(log), "-o", str(tmp_path / "test_hook.py")]) == ExitCode.USAGE
    assert "before kvledger recorded the call" in capsys.readouterr().err


def test_the_cause_comes_before_what_was_withheld_because_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache#2158 in a handler: the answer that is not pure first, then that vLLM could not have taken it."""
    monkeypatch.syspath_prepend(str(TESTS.parent / "docs" / "examples"))
    handlers = ["cached_answer:CachedAnswer"]
    caching = {"enable_prefix_caching": True, "chunk_size": 32, "block_size": 32, "handlers": handlers}
    engine = SimulatedEngine(num_blocks=40, host_bytes=1 << 24, **caching)
    for number in range(20):
        engine.add(f"request {number}", range(100 * number, 107 * number + 150), 60)
    engine.run()
    side = engine.connector.scheduler_side
    side.ledger.commit()
    log = read_end(side)
    engine.shutdown()
    withheld = {event.request_id for _, event in log.events if isinstance(event, e.DecisionWithheld)}
    assert withheld
    for request_id in withheld:
        incidents = find_incidents(log.configuration, log.events, request_id, composed_core(handlers)).incidents
        assert [incident.rule for incident in incidents][:2] == ["LOOKUP_PURE", "VLLM_CONTRACT"]
