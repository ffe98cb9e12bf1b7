"""What must hold after a world has ended; each check says what it verifies and what it does not.

Wrong KV is seen earlier: by `hashed_model.py` the moment it is read, by `pages.py` the moment it is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sim.checks.accounting import check_accounting
from sim.checks.audit import check_audit
from sim.checks.logs import check_logs
from sim.checks.nothing_left import check_nothing_left
from sim.checks.outputs import check_outputs
from sim.checks.pages import check_pages
from sim.checks.reasons import check_why
from sim.checks.regions import check_regions
from sim.checks.replay import check_replay
from sim.checks.rules import check_rules
from sim.checks.snapshots import check_snapshots

if TYPE_CHECKING:
    from sim.world import World

CHECKS: tuple[Callable[[World], None], ...] = (
    check_outputs,
    check_pages,
    check_rules,
    check_nothing_left,
    check_logs,
    check_replay,
    check_regions,
    check_audit,
    check_accounting,
    check_snapshots,
    check_why,
)
