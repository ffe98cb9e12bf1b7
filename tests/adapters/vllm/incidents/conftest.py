"""What incident tests share: the ways in which vLLM runs, the ways in which bytes move, and reports that come late."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sim.modes import RUNNERS, RUNNERS_SHORT, of_runner
from sim.reported import Reported, note_reports
from sim.slow_copies import delay

from kvledger.lifecycle import events as e

TRANSFERS: dict[str, dict[str, str]] = {
    "sync": {"load_mode": "sync", "save_mode": "sync"},
    "async": {"load_mode": "async", "save_mode": "async"},
}
"""Connector options of every way in which bytes can move. Tests that ask for `transfers` run once with each."""


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test with copies within the steps and with copies beside them."""
    if "transfers" not in metafunc.fixturenames:
        return
    if "runner" not in metafunc.fixturenames:
        metafunc.parametrize("transfers", TRANSFERS.values(), ids=TRANSFERS)
        return
    metafunc.parametrize(
        ("transfers", "runner"),
        [
            of_runner(name, TRANSFERS[mode], RUNNERS[name], label=f"{mode}-{name}")
            for mode in TRANSFERS
            for name in RUNNERS
            if mode == "sync" or name in RUNNERS_SHORT
        ],
    )


@pytest.fixture
def is_async(transfers: dict[str, str]) -> bool:
    """Whether all copies run asynchronously."""
    return transfers == TRANSFERS["async"]


@pytest.fixture
def make_engine(make_engine: Callable[..., Any], is_async: bool) -> Iterator[Callable[..., Any]]:
    """Build engines in which every asynchronous copy takes `num_questions` steps, as the worker asks once in each.

    When the test is over, vLLM must have been told exactly one end of each asynchronous load, and of each delayed
    free.
    """
    engines: list[tuple[Any, Reported]] = []

    def make(*, num_questions: int = 1, **options: Any) -> Any:
        engine = make_engine(**options)
        delay(engine, num_questions)
        engines.append((engine, note_reports(engine)))
        return engine

    yield make
    for engine, reported in engines:
        loads, held = engine.logged(e.LoadIssued), engine.logged(e.BlocksHeld)
        assert all(job.is_async is is_async for job in loads)
        assert Counter(reported.received) == Counter(load.request_id for load in loads if is_async)
        assert Counter(reported.sent) <= Counter(event.request_id for event in held)
        assert not engine.scheduler.requests


@pytest.fixture
def report_late() -> Callable[[Any, int], None]:
    """Return a function that lets a worker's reports arrive so many steps after they were made."""

    def report_late(engine: Any, num_steps: int) -> None:
        side = engine.worker._worker_side
        take = side.take_reports
        waiting: deque[Any] = deque([None] * num_steps)

        def take_late() -> Any:
            waiting.append(take())
            return waiting.popleft()

        side.take_reports = take_late

    return report_late
