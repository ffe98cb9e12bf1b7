"""Logs to open: the incident of the README, a short story, and several starts of an engine; and the command beside."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver
from stored_logs import OPENED_AT, tell_story, write_log

from kvledger.adapters.tools.cli.main import main

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
Objects = Callable[..., list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    """The log of `docs/examples/cached_answer.py`."""
    log: Path = runpy.run_path(str(EXAMPLES / "cached_answer.py"))["write_log"](tmp_path / "incident")
    return log


@pytest.fixture(scope="session")
def story() -> Driver:
    """A request computes, is preempted, is polled, comes back by a load and ends; another one is new."""
    return tell_story()


@pytest.fixture
def log(story: Driver, tmp_path: Path) -> Path:
    """The story as a log."""
    return write_log(tmp_path / "log", story.observed, story.configuration)


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """Two starts of an engine: `first` with the log of a worker, and `second`."""
    folder = tmp_path / "logs"
    for number, (name, request_id) in enumerate({"first": "chat-1-aa", "second": "chat-2-bb"}.items()):
        story = tell_story(request_id, f"warm-{number}")
        header = {"opened_at_unix_ns": OPENED_AT + number * 10**9, "engine_id": name}
        write_log(folder / name, story.observed, story.configuration, header=header)
        if name == "first":
            write_log(folder / "first-worker", (), story.configuration, header={**header, "worker_rank": 0})
    return folder


@pytest.fixture
def objects(capsys: pytest.CaptureFixture[str]) -> Objects:
    """What a command prints with `--json`: the objects of a type."""

    def printed(type_name: str, *arguments: object) -> list[dict[str, Any]]:
        capsys.readouterr()
        main([*map(str, arguments), "--json"])
        found = map(json.loads, capsys.readouterr().out.splitlines())
        return [each for each in found if each["type"] == type_name]

    return printed
