"""Which rows of the tables move a state, and which of them the events of a log use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.states import WorkRegion
from kvledger.lifecycle.table import JOB_REGIONS, NO_EVENTS, REGIONS

Row = tuple[str, StrEnum, str, StrEnum]
"""Region, source, trigger, dest."""

MOVING_ROWS: frozenset[Row] = frozenset(
    (region.name, source, trigger, dest)
    for region in (*REGIONS, *JOB_REGIONS)
    for source, trigger, dest in region.flat()
    if source is not dest
)

_Standing = Mapping[tuple[str, object], StrEnum]
"""(region, life or job) -> state."""


def rows_used(core: Core, configuration: LedgerConfiguration, events: Iterable[e.Event]) -> set[Row]:
    """The rows by which these events, a whole log, move the states of requests and jobs."""
    projections = core.new_projections(configuration)
    used: set[Row] = set()
    before = _standing(projections)
    for sequence, event in enumerate(events, 1):
        projections.fold(event, sequence)
        after = _standing(projections)
        triggers = (e.trigger_of(event), *NO_EVENTS)
        used |= {
            (region, source, trigger, dest)
            for (region, key), source in before.items()
            for trigger in triggers
            if (dest := after.get((region, key), WorkRegion.SETTLED)) is not source
        }
        before = after
    return used & MOVING_ROWS


def _standing(projections: Projections) -> _Standing:
    standing: dict[tuple[str, object], StrEnum] = {}
    for record in projections.tracker:
        life = record.ordinal
        for region in REGIONS:
            standing[region.name, life] = record.state if region.name == "phase" else getattr(record, region.name)
    for job in projections.jobs:
        standing["work", job.job_id] = job.work
        standing["source", job.job_id] = job.source
    for job in projections.jobs.given_up.values():
        standing["work", job.job_id] = job.work
    return standing
