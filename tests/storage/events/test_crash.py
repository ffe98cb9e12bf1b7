"""A killed process loses nothing that it had logged, wherever it was killed."""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path

import pytest
from log_torture import Plan
from log_torture.every_change import Moment, kill_at_each_change, kill_at_random

from kvledger.storage.events import Durability

pytestmark = pytest.mark.xdist_group("log_torture")

_NUM_KILLS = 40


@pytest.mark.parametrize(
    ("durability", "max_bytes"),
    [
        (Durability.OS, None),
        (Durability.DISK, 900),
        pytest.param(Durability.OS, 900, marks=pytest.mark.long),
        pytest.param(Durability.DISK, None, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("moment", ["before", "middle", "after"])
def test_a_writer_killed_at_any_change_of_a_file_loses_nothing_acknowledged(
    tmp_path: Path, small_process: Executor, durability: Durability, moment: Moment, max_bytes: int | None
) -> None:
    """Every call that changes a file is a place to die: in creating, appending, rolling over, retiring, closing."""
    plan = Plan(durability, max_bytes=max_bytes)
    assert small_process.submit(kill_at_each_change, tmp_path / "log", plan, moment).result() > 35


def test_writers_killed_at_random_lose_nothing_acknowledged(
    tmp_path: Path, small_process: Executor, random_seed: int
) -> None:
    """A sample of `make torture`: random plans, random moments."""
    outcomes = small_process.submit(kill_at_random, tmp_path / "log", random_seed, _NUM_KILLS).result()
    assert any(outcome.startswith("killed") for outcome in outcomes)
