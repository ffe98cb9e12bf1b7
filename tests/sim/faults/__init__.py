"""What goes wrong in a world. Each fault is a class of its own, on or off for a whole world, drawn from the seed.

A fault that is on draws from a random source of its own, so that it does the same whatever else is on.
"""

from __future__ import annotations

import random

from sim.faults.clients import Aborts, AbortsInStep, ReusedIds, Storms
from sim.faults.copies import FailingCopies
from sim.faults.disk import FullDisk, StallingDisk
from sim.faults.fault import Fault
from sim.faults.reports import DelayedReports, DoubledReports, DroppedReports, ReorderedReports
from sim.faults.resets import Resets
from sim.faults.restart import Restart

FAULTS: tuple[type[Fault], ...] = (
    Aborts,
    Storms,
    Resets,
    ReusedIds,
    FailingCopies,
    DelayedReports,
    DoubledReports,
    DroppedReports,
    ReorderedReports,
    StallingDisk,
    FullDisk,
    Restart,
    AbortsInStep,
)
"""In the order in which they act on a step; the order of the reports' faults is also that of the wire."""

CLIENT_FAULTS = frozenset({Aborts.name, Storms.name})
"""Those that any connector, and none, can live with and that change nothing about it: the worlds of comparisons."""


def draw_faults(seed: int) -> frozenset[str]:
    """The names of the faults that a seed switches on."""
    rng = random.Random(f"faults {seed}")
    return frozenset(fault.name for fault in FAULTS if rng.random() < fault.chance)
