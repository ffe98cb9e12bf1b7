"""The notebooks run from top to bottom, and print what is shown below their cells. `--rewrite` writes that anew."""

from __future__ import annotations

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def ran(notebook: Path) -> list[dict[str, Any]]:
    """The cells of a notebook, with what they print when they are run in order, as Jupyter stores it."""
    cells: list[dict[str, Any]] = json.loads(notebook.read_text())["cells"]
    names: dict[str, object] = {}
    number = 0
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        number += 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{notebook.name}, cell {number}", "exec"), names)  # noqa: S102
        lines = printed.getvalue().splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    return cells


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_prints_what_it_shows(
    notebook: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Run where it lies, as Jupyter does. No kernel is started and nothing is fetched."""
    monkeypatch.chdir(notebook.parent)
    monkeypatch.syspath_prepend(notebook.parent)
    cells = ran(notebook)
    if request.config.getoption("--rewrite"):
        whole = {**json.loads(notebook.read_text()), "cells": cells}
        notebook.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    shown = json.loads(notebook.read_text())["cells"]
    for cell, as_shown in zip(cells, shown, strict=True):
        assert cell == as_shown, "".join(cell["source"])


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_shows_only_what_it_prints(notebook: Path) -> None:
    """The value of a cell's last line would be shown by Jupyter, and this test does not run Jupyter."""
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            last = ast.parse("".join(cell["source"])).body[-1]
            assert not isinstance(last, ast.Expr) or ast.unparse(last).startswith("print("), ast.unparse(last)


def test_there_is_a_notebook() -> None:
    """Else the tests above would say nothing."""
    assert NOTEBOOKS
