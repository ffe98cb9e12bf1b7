"""Every tool asks the one reader about lives: one mistake there, and each of them says something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from golden_tools import GOLDEN
from kvledger.lifecycle import events as e
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.lives import Lives

FOLDS_LIVE_STATE = [name for name in GOLDEN if name.startswith("show --at, ")]
"""They show the state of the projections, which is a fold of its own."""


class Forgetful(Lives):
    """An id that was used before begins no life."""

    _seen: frozenset[str] = frozenset()

    @on(e.RequestArrived)
    def _arrived(self, event: e.RequestArrived) -> None:
        if event.request_id not in self._seen:
            self._seen |= {event.request_id}
            super()._arrived(event)


@pytest.mark.parametrize("name", [name for name in GOLDEN if name not in FOLDS_LIVE_STATE])
def test_a_tool_has_no_fold_of_lives_of_its_own(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that still said what follows from the story would have counted lives by itself."""
    monkeypatch.delenv("KVLEDGER_LOG", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("kvledger.lifecycle.reader.model.Lives", Forgetful)
    golden = GOLDEN[name]
    assert list(golden.output_of(golden.story.write(tmp_path / "log"))) != list(golden.expected)


@pytest.mark.parametrize("name", FOLDS_LIVE_STATE)
def test_what_decides_again_does_not_depend_on_the_reader(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a mistake in one of the two shows as a difference between them."""
    monkeypatch.delenv("KVLEDGER_LOG", raising=False)
    monkeypatch.setattr("kvledger.lifecycle.reader.model.Lives", Forgetful)
    golden = GOLDEN[name]
    assert list(golden.output_of(golden.story.write(tmp_path / "log"))) == list(golden.expected)
