"""What incident tests share: the ways in which vLLM runs, the ways in which bytes move, and reports that come late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

TRANSFERS: dict[str, dict[str, str]] = {"sync": {}}
"""Connector options of every way in which bytes can move. Tests that ask for `transfers` run once with each."""

RUNNERS = {
    "v1": {"async_scheduling": False, "model_runner_v2": False},
    "v2": {"async_scheduling": False, "model_runner_v2": True},
    "v1-two-steps": {"async_scheduling": True, "model_runner_v2": False},
    "v2-two-steps": {"async_scheduling": True, "model_runner_v2": True},
}


@pytest.fixture(params=TRANSFERS.values(), ids=TRANSFERS)
def transfers(request: pytest.FixtureRequest) -> dict[str, str]:
    """Options of an engine: how loads and saves move."""
    options: dict[str, str] = request.param
    return options


@pytest.fixture(params=RUNNERS.values(), ids=RUNNERS)
def runner(request: pytest.FixtureRequest) -> dict[str, bool]:
    """Options of an engine: the model runner, and how many steps are in flight."""
    options: dict[str, bool] = request.param
    return options


@pytest.fixture
def report_late() -> Callable[[Any, int], None]:
    """Return a function that lets a worker's reports arrive so many steps after they were made."""

    def delay(engine: Any, num_steps: int) -> None:
        side = engine.worker._worker_side
        take = side.take_reports
        waiting: deque[Any] = deque([None] * num_steps)

        def take_late() -> Any:
            waiting.append(take())
            return waiting.popleft()

        side.take_reports = take_late

    return delay
