"""Which scheduler, which shape of its output, and when copies run: what a test of the hooks is repeated for."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

RUNNERS = {
    "v1": {"async_scheduling": False, "model_runner_v2": False},
    "v2": {"async_scheduling": False, "model_runner_v2": True},
    "v1-two-steps": {"async_scheduling": True, "model_runner_v2": False},
    "v2-two-steps": {"async_scheduling": True, "model_runner_v2": True},
    "v2-drafter": {"async_scheduling": False, "model_runner_v2": True, "defer_finalize": True},
    "v2-two-steps-drafter": {"async_scheduling": True, "model_runner_v2": True, "defer_finalize": True},
}
"""Options of an engine: the model runner, how many steps are in flight, and whether saves follow a drafter."""

RUNNERS_SHORT = ("v2-drafter", "v1-two-steps")
"""Each runner, each number of steps in flight and each order once; `make test-long` has the others. Real engines are
v1, without a drafter."""


def of_runner(name: str, *values: object, label: str) -> ParameterSet:
    """A case of a parametrized test; long where the runner is none of `RUNNERS_SHORT`."""
    return pytest.param(*values, id=label, marks=() if name in RUNNERS_SHORT else pytest.mark.long)


runners = pytest.mark.parametrize(
    ("runner", "transfers"),
    [
        *(of_runner(name, runner, "auto", label=name) for name, runner in RUNNERS.items()),
        *(of_runner(name, RUNNERS[name], "async", label=f"{name}-async") for name in RUNNERS_SHORT),
    ],
)
"""With "auto" saves run within the steps, and loads too but with asynchronous scheduling; "async": none does."""

transfers_sync_and_async = pytest.mark.parametrize("transfers", ["auto", "async"])
