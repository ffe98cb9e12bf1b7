"""Which scheduler, which shape of its output, and when copies run: what a test of the hooks is repeated for."""

from __future__ import annotations

import pytest

RUNNERS = {
    "v1": {"async_scheduling": False, "model_runner_v2": False},
    "v2": {"async_scheduling": False, "model_runner_v2": True},
    "v1-two-steps": {"async_scheduling": True, "model_runner_v2": False},
    "v2-two-steps": {"async_scheduling": True, "model_runner_v2": True},
}
"""Options of an engine: the model runner, and how many steps are in flight."""

RUNNERS_ASYNC = ("v2", "v1-two-steps")
"""Those of them that asynchronous copies are tried with: each runner and each number of steps in flight once."""

runners = pytest.mark.parametrize(
    ("runner", "transfers"),
    [
        *(pytest.param(runner, "auto", id=name) for name, runner in RUNNERS.items()),
        *(pytest.param(RUNNERS[name], "async", id=f"{name}-async") for name in RUNNERS_ASYNC),
    ],
)
"""With "auto" saves run within the steps, and loads too but with asynchronous scheduling; "async": none does."""

transfers_sync_and_async = pytest.mark.parametrize("transfers", ["auto", "async"])
