"""The documents as they lie in the repository, and the scripts next to them."""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LoadScript = Callable[[str], types.ModuleType]


def load(path: str) -> types.ModuleType:
    """A script of docs/, which is no package, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, REPOSITORY / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def load_script() -> LoadScript:
    """Loads a script of docs/."""
    return load


@pytest.fixture(scope="session")
def documents() -> dict[str, str]:
    """Every document: path in the repository -> text."""
    paths = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    return {str(path.relative_to(REPOSITORY)): path.read_text() for path in sorted(paths)}
