"""What runs in a process of its own: the CUDA tests, alone and under `compute-sanitizer`, and real vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from gpu_check.machine import Machine
from gpu_check.report import Found, Lacking
from gpu_check.serve import MODES

TESTS = Path(__file__).resolve().parents[1]
CUDA_TESTS = (TESTS / "storage/kv/test_cuda.py",)
SANITIZER = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "86")
"""Ends with 86 where memory was read or written that was not the kernel's to touch."""


def pytest_command(tests: Sequence[Path], junit: Path) -> list[str]:
    """Pytest without the plugins and the settings of the development environment."""
    return [
        *(sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "gpu_check.device_fixture"),
        *("-c", str(TESTS / "gpu_check/without_lock.ini"), "--junitxml", str(junit), *map(str, tests)),
    ]


def passed(junit: Path) -> int:
    """How many tests have passed; raises where one failed or none ran."""
    suite = ET.parse(junit).getroot().find("testsuite")  # noqa: S314 -- written by the child a moment ago
    assert suite is not None, "pytest wrote no report"
    total, failed, errors, skipped = (int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped"))
    assert not failed + errors, f"{failed} of {total} tests failed, {errors} had errors: see above"
    assert total > skipped, f"of {total} tests {skipped} were skipped"
    return total - skipped


def run_tests(tests: Sequence[Path], before: Sequence[str] = (), **environment: str) -> Found:
    """Run these tests in a process of their own."""
    with tempfile.TemporaryDirectory() as directory:
        junit = Path(directory) / "junit.xml"
        command = [*before, *pytest_command(tests, junit)]
        code = subprocess.run(command, env=child_environment() | environment, check=False).returncode
        num_passed = passed(junit) if junit.exists() else 0
    assert code == 0, f"ended with {code}"
    return Found(num_passed, {"command": " ".join(command)})


def child_environment() -> dict[str, str]:
    """What this process imports the child imports, too."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def cuda_tests(_machine: Machine) -> Found:
    """The tests that a machine without a GPU skips."""
    return run_tests(CUDA_TESTS)


def sanitized(_machine: Machine) -> Found:
    """The same with each access to device memory checked; torch allocates each tensor apart, so that bounds count."""
    if shutil.which(SANITIZER[0]) is None:
        raise Lacking("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    return run_tests(CUDA_TESTS, SANITIZER, PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def real_vllm(_machine: Machine) -> Found:
    """Tiny random models whose requests are preempted: the outputs with and without the connector are equal."""
    needed = (
        "vllm",
        "transformers",
        "msgspec",
        "structlog",
        "google_crc32c",
        "transitions",
        "pydantic",
        "jinja2",
        "rich",
    )
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise Lacking(f"this Python has no {', '.join(missing)}")
    command = [sys.executable, "-m", "gpu_check.serve"]
    with tempfile.TemporaryDirectory() as directory:
        answer = Path(directory) / "figures.json"
        child = subprocess.run([*command, directory, str(answer)], env=child_environment(), check=False)
        assert child.returncode == 0, f"ended with {child.returncode}: see above"
        figures = json.loads(answer.read_text())
    for name, mover in (("short runs", "StagedMover"), ("long runs", "BatchedMover")):
        found = figures[name]
        for mode in MODES:
            assert found[f"outputs equal, {mode}"] == found["requests"], found
            assert found[f"tokens recovered, {mode}"], f"nothing was preempted and recovered: {found}"
            assert found[f"moved by, {mode}"] == [mover], found
            assert found[f"exit code of verify, {mode}"] == 0, found
    num_compared = len(MODES) * sum(found["requests"] for found in figures.values())
    return Found(num_compared, {"command": " ".join(command), **figures})
