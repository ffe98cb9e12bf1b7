"""Logs to export: the story at an engine's pace, many requests, and worlds on vLLM's real scheduler."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from headless_browser import Page, open_browser
from lifecycle_driver import Driver
from stored_logs import tell_story

from kvledger.storage.events.segment_file import UNFINISHED_SUFFIX

SEEDS = (1, 3, 7, 12, 20, 33)
"""Worlds with preemption, loads, evictions, broken rules, reset caches, killed engines and full disks among them."""


@pytest.fixture(scope="module")
def story() -> Driver:
    """The story, some milliseconds a step."""
    return tell_story(clock_rate=1700)


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Seed -> a directory with the logs of its engines."""
    from sim.world import World

    found = {}
    for seed in SEEDS:
        with World(seed, in_files=True) as world:
            world.run()
            found[seed] = tmp_path_factory.mktemp("worlds") / str(seed)
            assert world.log_dir is not None
            # The log is in use: what its maintenance is writing may be gone before it is copied.
            shutil.copytree(world.log_dir, found[seed], ignore=shutil.ignore_patterns(f"*{UNFINISHED_SUFFIX}"))
    return found


@pytest.fixture(scope="session")
def page(browser_path: str) -> Iterator[Page]:
    """A real browser."""
    with open_browser(browser_path) as opened:
        yield opened
