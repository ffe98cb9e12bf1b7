"""Tests that belong together run in one process, also where several run at once."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("kept")
def test_a_group_is_kept_on_one_worker(request: pytest.FixtureRequest) -> None:
    """pytest-xdist distributes by node ids, behind which it writes the group. Where pytest does not let it,
    two engines would start at once, and what a group shares would be made twice.
    """
    is_grouped = request.config.getoption("loadgroup", default=False)
    assert request.node.nodeid.endswith("@kept") or not is_grouped
