"""What a region says, held against the other projections, which are folded from other fields of the same events."""

from __future__ import annotations

from collections.abc import Iterable

from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.copies import CopyKind
from kvledger.lifecycle.projections.request_record import RequestRecord
from kvledger.lifecycle.states import BlocksRegion, WorkRegion


def region_differences(events: Iterable[tuple[int, e.Event]], configuration: LedgerConfiguration) -> list[str]:
    """Where, along a log, the region `blocks` of a request or `work` of a job is not what blocks and jobs say."""
    projections = Core.standard().new_projections(configuration)
    found: list[str] = []
    for sequence, event in events:
        projections.fold(event, sequence)
        concerned = [projections.tracker.get(event.request_id)] if isinstance(event, e.RequestEvent) else []
        known = list(projections.tracker) if isinstance(event, e.StepScheduled | e.CacheReset) else concerned
        found += [
            f"{sequence} {event.id}: {record} has blocks {_blocks(record, projections)}"
            for record in known
            if record is not None and record.blocks is not _blocks(record, projections)
        ]
        in_flight = {job.work for job in projections.jobs} - {WorkRegion.ISSUED, WorkRegion.OVERDUE}
        given_up = {job.work for job in projections.jobs.given_up.values()} - {WorkRegion.GIVEN_UP}
        found += [f"{sequence} {event.id}: a job is {work}" for work in in_flight | given_up]
    return found


def _blocks(record: RequestRecord, projections: Projections) -> BlocksRegion:
    if record.block_ids is None:
        return BlocksRegion.NONE
    is_loading = any(
        job.kind is CopyKind.LOAD and job.generation == record.generation
        for job in projections.jobs.of_life(record.ordinal)
    )
    return BlocksRegion.LOADING if is_loading else BlocksRegion.GRANTED


def check_regions(events: Iterable[tuple[int, e.Event]], configuration: LedgerConfiguration) -> None:
    """Regions, blocks and jobs tell one story."""
    assert region_differences(events, configuration) == []
