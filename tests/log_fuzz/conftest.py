"""What commands on changed logs need besides these logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from log_fuzz.guarded import warm_up
from log_fuzz.planted import story_log


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | Path]:
    """A sound log, and a directory for output. Every command has run once, so its forks import nothing."""
    folder = tmp_path_factory.mktemp("fuzz")
    out = folder / "out"
    out.mkdir()
    other = story_log(folder / "other")
    places: dict[str, str | Path] = {"LOG": other, "DIR": folder, "OTHER": other, "REQUEST": "chat-17", "OUT": out}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        warm_up(places)
    return places
