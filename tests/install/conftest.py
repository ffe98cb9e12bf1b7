"""The wheel, built once, and an environment that holds nothing but the wheel and what it requires."""

from __future__ import annotations

import contextlib
import io
import runpy
import shutil
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from processes import finished

REPOSITORY = Path(__file__).resolve().parents[2]


def succeed(*command: str | Path, cwd: Path) -> str:
    """Run it to its end, which must be a good one; returns stdout."""
    ended = finished(command, cwd=cwd)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def built(sources: Path) -> Path:
    """The wheel of the project in `sources`, which must be a copy: a build leaves files behind."""
    succeed(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "out", ".", cwd=sources)
    (wheel,) = (sources / "out").glob("*.whl")
    return wheel


def make_environment(folder: Path, wheels: Iterable[Path], also: Iterable[str] = ()) -> Path:
    """The interpreter of an environment in which pip has installed these wheels, without a network.

    What their metadata asks for without any extra, what `also` names, and what all that asks for, is linked from the
    environment of the tests; nothing else can be imported.
    """
    succeed(sys.executable, "-m", "venv", "--without-pip", ".", cwd=folder)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    succeed(*pip, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", *wheels, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    installed = {canonicalize_name(each.name): each for each in map(PathDistribution, packages.glob("*.dist-info"))}
    needed = [distribution(name) for name in also]
    for package in brought_along([*installed.values(), *needed]) + needed:
        if canonicalize_name(package.name) not in installed:
            for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
                (packages / name).symlink_to(str(package.locate_file(name)))
    return python


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that no earlier build can leak into a wheel."""
    sources = tmp_path_factory.mktemp("sources")
    for folder in ("lifecycle", "storage", "adapters"):
        shutil.copytree(REPOSITORY / folder, sources / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        shutil.copy(REPOSITORY / name, sources / name)
    return sources


@pytest.fixture(scope="session")
def wheel_file(sources: Path) -> Path:
    """A wheel built from these sources."""
    return built(sources)


@pytest.fixture(scope="session")
def light_python(wheel_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that kvledger alone was installed into, without a network."""
    return make_environment(tmp_path_factory.mktemp("light"), [wheel_file])


@pytest.fixture(scope="session")
def guarded_python(wheel_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same environment with pytest, and with the package of docs/examples/starvation_guard, built as a wheel."""
    sources = tmp_path_factory.mktemp("guard") / "sources"
    shutil.copytree(REPOSITORY / "docs/examples/starvation_guard", sources)
    return make_environment(tmp_path_factory.mktemp("guarded"), [wheel_file, built(sources)], also=["pytest"])


def brought_along(packages: Iterable[Distribution]) -> list[Distribution]:
    """What is installed with `packages` when no extra is asked for."""
    found: dict[str, Distribution] = {}
    pending = list(packages)
    while pending:
        for requirement in map(Requirement, pending.pop().requires or ()):
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and requirement.name not in found:
                found[requirement.name] = distribution(requirement.name)
                pending.append(found[requirement.name])
    return list(found.values())


@pytest.fixture(scope="session")
def example_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of docs/examples/cached_answer.py, in which a rule is broken."""
    script, printed = REPOSITORY / "docs/examples/cached_answer.py", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [str(script), str(tmp_path_factory.mktemp("example"))])
        runpy.run_path(str(script), run_name="__main__")
    return Path(printed.getvalue().splitlines()[-1])
