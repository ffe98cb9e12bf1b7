"""An incident becomes a test that fails with the mistake that led to it, and passes without.

The mistakes are made while an engine runs. Of each log a test is written, with the mistake mended; then pytest runs all
of these tests in a process of its own, each once with the mistake and once without.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from processes import finished
from sim.checks.rules import allowed_rules
from sim.logs import read_end
from sim.world import World

from kvledger.adapters.core import composed_core
from kvledger.adapters.repro.incident import find_incidents
from kvledger.adapters.simulation.engine import SimulatedEngine
from kvledger.lifecycle import events as e

pytestmark = [pytest.mark.scheduler, pytest.mark.xdist_group("incidents")]

TESTS = Path(__file__).parents[2]
NUM_SEEDS = 40


def load_mistakes() -> Any:
    """The module beside this one, which the other process takes for a plugin."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("mistakes", Path(__file__).with_name("mistakes.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def mistakes() -> Any:
    """All mistakes."""
    return load_mistakes()


def world_with(patch: tuple[Any, str, Any], first_seed: int) -> tuple[Any, str]:
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
        allowed = allowed_rules(world)
        for incident in find_incidents(log.configuration, log.events, None).incidents:
            whose = find_incidents(log.configuration, log.events, incident.request_id or None).incidents
            # What a fault of the world breaks stays broken: a test of that is another matter.
            if not any(of_request.rule in allowed for of_request in whose):
                return log, incident.request_id
    pytest.fail(f"no world breaks a rule because of {patch[1]}")


def engine_with(patch: tuple[Any, str, Any]) -> tuple[Any, list[tuple[int, e.Event]]]:
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
    return end.configuration, end.events


@pytest.fixture(scope="module")
def generated(mistakes: Any, tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one generated test file for each mistake."""
    folder = tmp_path_factory.mktemp("generated")
    logs = tmp_path_factory.mktemp("logs")
    wanted: dict[str, list[str]] = {}
    for name, (patch, first_seed) in mistakes.OF_THE_CORE.items():
        log, request_id = world_with(patch, first_seed)
        directory = tools.write_log(logs / name, [event for _, event in log.events], log.configuration)
        wanted[str(folder / f"test_{name}.py")] = [str(directory), *([request_id] if request_id else [])]
    for name, patch in mistakes.IN_THE_ADAPTER.items():
        configuration, events = engine_with(patch)
        assert any(isinstance(event, e.HookFailed) for _, event in events), name
        directory = tools.write_log(logs / name, [event for _, event in events], configuration)
        wanted[str(folder / f"test_{name}.py")] = [str(directory)]
    write_tests(wanted)
    return folder


def write_tests(wanted: Mapping[str, list[str]]) -> None:
    """`kvledger repro ... > path` for each path, in a process that never imports vLLM."""
    script = """
import contextlib, json, pathlib, sys
from kvledger.adapters.cli.main import main

for path, arguments in json.loads(sys.argv[1]).items():
    with pathlib.Path(path).open("w") as file, contextlib.redirect_stdout(file):
        exit_code = main(["repro", *arguments])
    assert exit_code == 0, path
assert "vllm" not in sys.modules
"""
    run = finished([sys.executable, "-c", script, json.dumps(wanted)])
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="module")
def outcomes(generated: Path) -> dict[str, dict[str, list[str]]]:
    """With the mistake or mended -> file name -> how each of its tests ended, in the order of the file."""
    run = finished(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "mistakes",
            "-v",
            "--no-header",
            "-p",
            "no:cacheprovider",
            str(generated),
        ],
        cwd=generated,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(TESTS), os.environ.get("PYTHONPATH", "")]),
        },
    )
    found: dict[str, dict[str, list[str]]] = {"mistaken": {}, "mended": {}}
    ended = re.findall(r"test_(\w+)\.py::test_\S+\[(\w+)\] (\w+)", run.stdout.split("= FAILURES =")[0])
    for name, which, how in ended:
        found[which].setdefault(name, []).append(how)
    assert ended, run.stdout + run.stderr
    return found


def test_with_the_mistake_each_incident_comes_back(outcomes: Any, mistakes: Any) -> None:
    """Every generated file fails, and the first failure is the recorded one."""
    assert {name: found[0] for name, found in outcomes["mistaken"].items()} == dict.fromkeys(mistakes.ALL, "FAILED")


def test_without_the_mistake_no_incident_comes_back(outcomes: Any, mistakes: Any) -> None:
    """Every generated file passes: what is asked for is the mistake, not the recorded consequences."""
    assert {name: set(found) for name, found in outcomes["mended"].items()} == {
        name: {"PASSED"} for name in mistakes.ALL
    }


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


def test_generated_files_can_go_into_a_test_suite(generated: Path) -> None:
    """Formatted as the project is, and without complaints of its linter."""
    project = TESTS.parent / "pyproject.toml"
    # Outside of a test folder nobody has told the linter that tests assert.
    for command in (["format", "--check"], ["check", "--ignore", "S101,INP001"]):
        run = finished(
            [sys.executable, "-m", "ruff", *command, "--config", str(project), "--no-cache", *_python_files(generated)]
        )
        assert run.returncode == 0 or "No module named ruff" in run.stderr, run.stdout + run.stderr


def _python_files(folder: Path) -> list[str]:
    return [str(path) for path in sorted(folder.glob("*.py"))]
