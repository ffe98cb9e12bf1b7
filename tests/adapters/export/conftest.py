"""Logs to export: the story at an engine's pace, many requests, and worlds on vLLM's real scheduler."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from headless_browser import Page, open_browser
from lifecycle_driver import Driver, keys_of
from stored_logs import header_of, tell_story, write_log

SEEDS = (1, 3, 7, 12, 20, 33)
"""Worlds with preemption, loads, evictions, broken rules, reset caches, killed engines and full disks among them."""
_CLOCK_RATE = 1700


def story_at_engine_pace(request_id: str = "chat-17-b6", other_id: str = "chat-9") -> Driver:
    """The story, some milliseconds a step."""
    return tell_story(request_id, other_id, clock_rate=_CLOCK_RATE)


def serve_many(num_requests: int) -> Driver:
    """Requests one after the other; the 777th is preempted."""
    driver = Driver(num_slots=64)
    for number in range(num_requests):
        name = f"r{number}"
        driver.start(name, keys_of(name, 2), 20, (1, 2))
        if number == 777:
            driver.preempt(name, 20)
        driver.settle_all()
        driver.finish(name, 20, 21)
        driver.settle_all()
    driver.ledger.commit()
    return driver


@attrs.frozen
class Tools:
    """What tests call by name."""

    write_log = staticmethod(write_log)
    header_of = staticmethod(header_of)
    tell_story = staticmethod(story_at_engine_pace)
    serve_many = staticmethod(serve_many)


@pytest.fixture(scope="session")
def tools() -> Tools:
    """Functions that make logs."""
    return Tools()


@pytest.fixture(scope="module")
def story() -> Driver:
    """The story, played once."""
    return story_at_engine_pace()


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
            shutil.copytree(world.log_dir, found[seed])
    return found


@pytest.fixture(scope="session")
def page(browser_path: str) -> Iterator[Page]:
    """A real browser."""
    with open_browser(browser_path) as opened:
        yield opened
