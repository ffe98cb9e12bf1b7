"""Every tool says of its golden log what follows from the log's story."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest

from golden_tools import GOLDEN, TELLS_NOTHING_OF_LIVES
from golden_tools.story import FOLDER, Story
from kvledger.adapters.tools.cli.commands import COMMANDS
from kvledger.adapters.tools.logs import index


@pytest.fixture(autouse=True)
def _own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may have a default log, and a cache of indexes."""
    monkeypatch.delenv("KVLEDGER_LOG", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.txt")))
def test_a_story_has_the_events_that_its_log_has(name: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """If the change is meant, run `pytest tests/golden_tools --rewrite`, review it, and derive the outputs again."""
    path = FOLDER / f"{name}.txt"
    played = Story(path.read_text()).with_events(tmp_path / "log") + "\n"
    if pytestconfig.getoption("--rewrite"):
        path.write_text(played)
    assert path.read_text().splitlines() == played.splitlines()


@pytest.mark.parametrize("name", GOLDEN)
def test_a_tool_says_what_follows_from_the_story(name: str, tmp_path: Path) -> None:
    """If it fails, check the expected output against the story, figure by figure, before you change either."""
    golden = GOLDEN[name]
    assert golden.expected
    assert list(golden.output_of(golden.story.write(tmp_path / "log"))) == list(golden.expected)


@pytest.mark.parametrize("name", GOLDEN)
def test_it_says_the_same_of_a_log_with_an_index(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large logs have one."""
    monkeypatch.setattr(index, "INDEX_FROM_BYTES", 0)
    golden = GOLDEN[name]
    assert list(golden.output_of(golden.story.write(tmp_path / "log"))) == list(golden.expected)


def test_no_tool_is_forgotten() -> None:
    """Each command has a golden log, or a reason why it needs none."""
    commands = {*COMMANDS, *(each.name for each in entry_points(group="kvledger.commands"))}
    assert commands == {*(golden.command for golden in GOLDEN.values()), *TELLS_NOTHING_OF_LIVES}
    assert not {golden.command for golden in GOLDEN.values()} & TELLS_NOTHING_OF_LIVES.keys()
