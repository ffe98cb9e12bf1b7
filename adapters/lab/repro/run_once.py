"""Runs a generated test once, in a process of its own, and returns how the test ended.

In a new process, modules and classes of the user's handlers have no state from earlier trials. The new process imports
from the same folders as the process that starts it. The test's folder is not one of them, because a log and the files
around it may come from a stranger. This module must not depend on the content of the test.
"""

from __future__ import annotations

import enum
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

import attrs

from kvledger.adapters.tools.logs.visible import shortened
from kvledger.lifecycle import raise_if_unstoppable

_CHILD = "from kvledger.adapters.lab.repro.run_once import main; main()"
_MAX_TEXT = 500


class Ended(enum.StrEnum):
    """How a test function ended."""

    PASSED = "passed"
    FAILED = "failed"
    """An assertion failed."""
    NOT_RUN = "not_run"
    """The test raised another error, or its process died. So it is not known whether the test passes or fails."""


@attrs.frozen
class TestRun:
    """The result of one test function."""

    __test__ = False  # pytest takes a class of this name for a test

    name: str
    ended: Ended
    text: str = ""
    """The exception on one line; empty if the test passed."""


def run_once(test: Path) -> list[TestRun]:
    """Run every test function of a file in one new process, and return the results."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        # A relative entry is for a hook of this process. There it would be a folder below the working directory.
        places = [place or str(Path.cwd()) for place in sys.path if not place or Path(place).is_absolute()]
        finished = subprocess.run(  # noqa: S603 -- this interpreter, and the file that was just written
            [sys.executable, "-c", _CHILD, str(test), str(result)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places), "PYTHONSAFEPATH": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )
        if result.exists():
            return [TestRun(name, Ended(ended), text) for name, ended, text in json.loads(result.read_text())]
    last = finished.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    text = f"its process ended with exit code {finished.returncode}{f': {shortened(last, _MAX_TEXT)}' if last else ''}"
    return [TestRun(test.stem, Ended.NOT_RUN, text)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the test functions of a file, and write the results to another file. Called in the new process.

    Args:
        arguments: the path of the test and the path for the results; None: take both from the command line.
    """
    test, result = map(Path, sys.argv[1:] if arguments is None else arguments)
    try:
        functions = {name: each for name, each in runpy.run_path(str(test)).items() if name.startswith("test_")}
    except BaseException as error:  # noqa: BLE001 -- whatever it imports
        raise_if_unstoppable(error)
        functions = {}
        runs = [(test.stem, Ended.NOT_RUN.value, _text_of(error))]
    else:
        runs = []
    for name, function in functions.items():
        try:
            function()
        except AssertionError as error:
            runs.append((name, Ended.FAILED.value, _text_of(error)))
        except BaseException as error:  # noqa: BLE001 -- whatever it runs into
            raise_if_unstoppable(error)
            runs.append((name, Ended.NOT_RUN.value, _text_of(error)))
        else:
            runs.append((name, Ended.PASSED.value, ""))
    unfinished = result.with_suffix(".part")
    unfinished.write_text(json.dumps(runs))
    unfinished.replace(result)


def _text_of(error: BaseException) -> str:
    return shortened(" ".join("".join(traceback.format_exception_only(error)).split()), _MAX_TEXT)
