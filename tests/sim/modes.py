"""Which scheduler, which shape of its output, and when copies run: what a test of the hooks is repeated for."""

from __future__ import annotations

import pytest

runners = pytest.mark.parametrize(
    ("async_scheduling", "model_runner_v2", "transfers"),
    [
        (False, False, "auto"),
        (False, True, "auto"),
        (True, False, "auto"),
        (True, True, "auto"),
        (False, True, "beside"),
        (True, False, "beside"),
    ],
)
"""With "auto" saves run within the steps, and loads too but with asynchronous scheduling; "beside": all beside them."""

transfers_within_and_beside = pytest.mark.parametrize("transfers", ["auto", "beside"])
