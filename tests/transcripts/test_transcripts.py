"""Every transcript plays as it stands: `--rewrite` writes the output anew, and the diff says what has changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from lifecycle_driver.rows import MOVING_ROWS, Row
from lifecycle_driver.transcript import replayed

FOLDER = Path(__file__).parent
EXAMPLES = FOLDER.parents[1] / "docs/examples"


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.txt")))
def test_a_transcript_plays_as_it_stands(
    name: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the change is meant: `pytest tests/transcripts --rewrite`, and review the diff."""
    monkeypatch.syspath_prepend(EXAMPLES)  # for handlers of docs/examples
    path = FOLDER / name
    played = replayed(path.read_text())
    if pytestconfig.getoption("--rewrite"):
        path.write_text(played)
    assert path.read_text().splitlines() == played.splitlines()


def test_every_row_that_moves_a_state_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the transcripts show the whole machine; a new row needs a paragraph of its own."""
    monkeypatch.syspath_prepend(EXAMPLES)
    used: set[Row] = set()
    for path in FOLDER.glob("*.txt"):
        replayed(path.read_text(), used)
    assert sorted(f"{row[0]}: {row[1]} {row[2]} {row[3]}" for row in MOVING_ROWS - used) == []
