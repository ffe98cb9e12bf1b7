"""Commands that are run in this process, and logs for them to read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from lifecycle_driver import Driver
from stored_logs import tell_story, write_log

from kvledger.adapters.tools.cli.main import main
from kvledger.lifecycle.projections.jobs import Jobs


@pytest.fixture(scope="module")
def story() -> Driver:
    """The story, played once."""
    return tell_story()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model without its weights: 2 layers, 2 heads of 32 numbers."""
    from kvledger.adapters.lab.demo.model import make_model

    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_model(directory)
    (directory / "model.safetensors").unlink()
    return directory


@pytest.fixture
def log(story: Driver, tmp_path: Path) -> Path:
    """The story as a log of one segment."""
    return write_log(tmp_path / "log", story.observed, story.configuration)


@attrs.frozen
class Result:
    """What a command printed and returned."""

    exit_code: int
    out: str
    err: str

    def objects(self, type_name: str | None = None) -> list[dict[str, object]]:
        """The JSON objects on stdout, all or those of a type."""
        found = [json.loads(line) for line in self.out.splitlines()]
        return [item for item in found if type_name in {None, item["type"]}]


Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def _no_default_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have one."""
    monkeypatch.delenv("KVLEDGER_LOG", raising=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `kvledger` in this process."""

    def run_main(*arguments: object) -> Result:
        capsys.readouterr()
        exit_code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(exit_code, captured.out, captured.err)

    return run_main


@pytest.fixture
def failing_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fold of a quarantine raises, as that of `stored_logs.unfoldable` did: no event is known to cause it now."""

    def doubt_saves(_projection: Jobs, ordinal: int) -> None:
        raise KeyError(ordinal)

    monkeypatch.setattr(Jobs, "_doubt_saves", doubt_saves)
