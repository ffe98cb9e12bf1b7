"""The examples use what is promised to everybody, so that who copies one depends on nothing that may change."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
PROMISED = {
    "kvledger",
    "kvledger.lifecycle",
    *(f"kvledger.lifecycle.{module}" for module in ("audit", "codec", "decisions", "events", "handlers", "snapshots")),
    *(f"kvledger.lifecycle.{module}" for module in ("testing", "windows")),
    "kvledger.storage.events",
    "kvledger.storage.kv",
}
"""Modules, as `kvledger.lifecycle` says."""


def source_of(file: Path) -> str:
    """A program's text, or that of a notebook's cells."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".ipynb":
        return text
    cells = (cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
    return "\n".join("".join(cell["source"]) for cell in cells)


def imported(source: str) -> Iterator[tuple[str, str]]:
    """(module, name in it) of all imports of kvledger."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.module, alias.name) for alias in node.names if node.module.startswith("kvledger"))
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("kvledger"))


def is_promised(module: str, name: str) -> bool:
    """Whether everybody may import it from there."""
    if f"{module}.{name}" in PROMISED:
        return True
    if module not in PROMISED:
        return False
    if not name:
        return module == "kvledger"
    there = importlib.import_module(module)
    return name in getattr(there, "__all__", vars(there)) and not name.startswith("_")


@pytest.mark.parametrize(
    "file", sorted([*EXAMPLES.rglob("*.py"), *EXAMPLES.rglob("*.ipynb")]), ids=lambda file: file.name
)
def test_an_example_imports_what_is_promised_and_nothing_else(file: Path) -> None:
    """Extenders copy them."""
    assert [pair for pair in imported(source_of(file)) if not is_promised(*pair)] == []


@pytest.mark.parametrize(
    "source",
    [
        "from kvledger.lifecycle.ledger import Decider",
        "from kvledger.lifecycle.turn import Turn",
        "from kvledger.lifecycle import machine",
        "import kvledger.lifecycle.machine",
        "from kvledger.adapters.vllm.journal import Journal",
    ],
)
def test_what_is_not_promised_is_found(source: str) -> None:
    """It may change with any version."""
    (pair,) = imported(source)
    assert not is_promised(*pair)
