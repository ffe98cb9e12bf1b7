"""The wheel holds every source file, under the one import root, and nothing else."""

from __future__ import annotations

import itertools
import re
import runpy
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from packaging.requirements import Requirement

import kvledger

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("lifecycle", "storage", "adapters")
PUBLIC = REPOSITORY / "adapters/public"
"""Its files are those of `kvledger` itself."""


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> set[PurePosixPath]:
    """The names in the wheel."""
    with zipfile.ZipFile(wheel_file) as opened:
        return {PurePosixPath(name) for name in opened.namelist()}


def source_files() -> set[PurePosixPath]:
    """Every file of the three folders, under the name it must have in the wheel."""
    return {
        PurePosixPath("kvledger", *file.relative_to(PUBLIC if file.parent == PUBLIC else REPOSITORY).parts)
        for folder in FOLDERS
        for file in (REPOSITORY / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_every_source_file_is_in_the_wheel(wheel: set[PurePosixPath]) -> None:
    """A folder without __init__.py, or a data file that pyproject.toml does not name, would be missing."""
    missing = sorted(str(name) for name in source_files() - wheel)
    assert not missing, f"add an __init__.py, or a line under [tool.setuptools.package-data], for: {missing}"


def test_every_part_says_that_it_is_typed(wheel: set[PurePosixPath]) -> None:
    """Type checkers believe annotations only next to a py.typed file."""
    assert {PurePosixPath("kvledger", folder, "py.typed") for folder in ("", *FOLDERS)} <= wheel


def test_nothing_installs_outside_the_import_root(wheel: set[PurePosixPath]) -> None:
    """A bare top-level `storage` would collide with somebody else's."""
    assert {name.parts[0] for name in wheel if not name.parts[0].endswith(".dist-info")} == {"kvledger"}


def test_the_package_itself_is_one_file(wheel: set[PurePosixPath]) -> None:
    """Besides its parts. The folder of that file is no part: a checkout alone could import it under that name."""
    inside = {name.relative_to("kvledger") for name in wheel if name.parts[0] == "kvledger"}
    assert {path.parts[0] for path in inside} == {*FOLDERS, "__init__.py", "py.typed"}
    assert not [path for path in inside if path.parts[:2] == ("adapters", "public")]


def runtime_requirements() -> list[Requirement]:
    """Those of kvledger alone, and those of every extra."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return list(map(Requirement, itertools.chain(project["dependencies"], *project["optional-dependencies"].values())))


def test_the_lock_starts_from_the_runtime_dependencies() -> None:
    """A dependency in pyproject.toml that the development environment lacks would fail first at a user's."""
    lines = (REPOSITORY / "requirements" / "requirements.in").read_text().splitlines()
    named = {Requirement(line).name for line in lines if line and not line.startswith("#")}
    assert {requirement.name for requirement in runtime_requirements()} <= named


def test_every_locked_version_is_one_that_kvledger_allows() -> None:
    """Tests run against the lock: a range that leaves its version out would be untested from end to end."""
    lines = (REPOSITORY / "requirements" / "lock.txt").read_text().splitlines()
    locked = dict(line.removesuffix(" \\").split("==") for line in lines if "==" in line and not line.startswith(" "))
    for requirement in runtime_requirements():
        assert requirement.specifier.contains(locked[requirement.name]), str(requirement)


@pytest.fixture(scope="module")
def metadata(wheel_file: Path) -> Message:
    """What a package index shows of the wheel."""
    with zipfile.ZipFile(wheel_file) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(opened.read(name))


def test_the_version_is_that_of_the_code(metadata: Message) -> None:
    """It is written there, and once more for those who cite."""
    assert metadata["Version"] == kvledger.__version__


def test_no_link_of_the_description_leads_nowhere(metadata: Message) -> None:
    """Links into the repository are words there, as long as nobody can visit it; others stay."""
    description = metadata.get_payload()
    assert isinstance(description, str)
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", description) == []
    assert "](https://github.com/LMCache/LMCache/issues/2158)" in description


@pytest.fixture
def setup_script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of setup.py, which sets nothing up."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    return runpy.run_path(str(REPOSITORY / "setup.py"))


def test_a_description_leads_to_the_repository_that_is_named(setup_script: dict[str, Any]) -> None:
    """As soon as `[project.urls]` has one."""
    text = "![a](docs/a.svg) [b](docs/b.md#c) [d](https://e) [f](#g)"
    assert setup_script["read_elsewhere"](text, "https://host/it") == (
        "![a](https://host/it/raw/main/docs/a.svg) [b](https://host/it/blob/main/docs/b.md#c) [d](https://e) [f](#g)"
    )
    assert setup_script["read_elsewhere"](text, None) == " b [d](https://e) [f](#g)"
