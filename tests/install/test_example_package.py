"""The example of an extension as its users have it: a wheel next to the one of kvledger, found by its entry point."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest
from processes import finished

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("light")]

REPOSITORY = Path(__file__).resolve().parents[2]


def output_of(*command: str | Path, cwd: Path, python_path: str = "") -> str:
    """What a command says, in one line; it must end well."""
    ended = finished(command, cwd=cwd, env={**os.environ, "PYTHONPATH": python_path})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return " ".join(ended.stdout.split())


@pytest.fixture(scope="module")
def starving(guarded_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of an engine with both wheels; vLLM and what the connector needs are those of the tests."""
    folder = tmp_path_factory.mktemp("starving")
    python_path = os.pathsep.join([str(REPOSITORY / "tests"), sysconfig.get_path("purelib")])
    code = "import starvation_guard, kvledger.lifecycle as core; print(core.__file__, starvation_guard.__file__)"
    places = output_of(guarded_python, "-c", code, cwd=folder, python_path=python_path).split()
    assert all(Path(place).is_relative_to(guarded_python.parents[1]) for place in places), places
    output_of(guarded_python, "-m", "sim.starving", folder / "logs", cwd=folder, python_path=python_path)
    (log,) = (path for path in (folder / "logs").iterdir() if path.is_dir())
    return log


def test_its_own_tests_pass_where_nothing_else_is_installed(guarded_python: Path, tmp_path: Path) -> None:
    """No vLLM, no torch, and nothing of the repository but the tests themselves."""
    shutil.copytree(REPOSITORY / "docs/examples/starvation_guard/tests", tmp_path / "tests")
    assert " passed" in output_of(guarded_python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=tmp_path)


def test_the_engine_finds_it_by_itself(guarded_python: Path, starving: Path, tmp_path: Path) -> None:
    """By its entry point, and so does whoever reads the log where it is installed: its rule is held against the log."""
    kvledger = guarded_python.with_name("kvledger")
    assert "starvation 1, starvation_guard:StarvationGuard" in output_of(kvledger, "core", cwd=tmp_path)
    assert "which is not installed here" not in output_of(kvledger, "verify", starving, cwd=tmp_path)
    assert "STARVING_KEPT" in output_of(kvledger, "core", starving, cwd=tmp_path)


def test_a_reader_without_it_says_so_and_verifies_the_rest(light_python: Path, starving: Path, tmp_path: Path) -> None:
    """Its sub-states and events are shown all the same."""
    kvledger = light_python.with_name("kvledger")
    verdict = output_of(kvledger, "verify", starving, cwd=tmp_path)
    extension = "extension starvation 1 (starvation_guard:StarvationGuard)"
    assert f"was written with {extension}, which is not installed here" in verdict
    assert "its rules STARVING_KEPT were not checked" in verdict
    shown = output_of(kvledger, "show", starving, "request 11", cwd=tmp_path)
    assert "starvation 1: starving (num_preemptions 2)" in shown
