"""The regions of `table.py` walked along a log, beside what the projections say about the same requests and jobs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.machine import trigger_of
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.tracker import RequestRecord
from kvledger.lifecycle.projections.transfers import JobKind
from kvledger.lifecycle.states import BlocksRegion, CurrentRegion, FirstRegion, SourceRegion, TrustRegion, WorkRegion
from kvledger.lifecycle.table import JOB_REGIONS, REGIONS, State

_ABOUT_A_JOB = (e.LoadCompleted, e.LoadFailed, e.SaveCompleted, e.SaveFailed, e.TransferAwaited)
_ISSUES_A_JOB = (e.LoadIssued, e.SaveIssued, e.TailSaveIssued)


class WalkedRegions:
    """Takes up a log; `refused` and `different` say where a region had no row, and where a flag says something else."""

    def __init__(self, configuration: LedgerConfiguration) -> None:
        self.projections = Projections(Core.standard(), configuration)
        self.reference = Core.standard().reference
        self.requests: dict[int, dict[str, State]] = {}
        self.jobs: dict[int, dict[str, State]] = {}
        self.refused: list[str] = []
        self.different: list[str] = []
        self._asked_stale: set[int] = set()
        """Requests that were looked up since a reset: they hold nothing that could be stale."""

    def take(self, events: Iterable[tuple[int, e.Event]]) -> None:
        """Take up events; walk before each fold, compare behind it."""
        for sequence, event in events:
            record = None
            if isinstance(event, e.RequestEvent) and not isinstance(event, e.RequestArrived):
                record = self.projections.tracker.get(event.request_id)
            self._walk(sequence, event, record)
            self.projections.fold(event, sequence)
            self._begin(event)
            for known in self.projections.tracker if isinstance(event, e.StepScheduled | e.CacheReset) else [record]:
                if known is not None and self.projections.tracker.of(known.ordinal) is known:
                    self._compare_request(sequence, event, known)
            self._compare_jobs(sequence, event)

    def _begin(self, event: Any) -> None:
        if isinstance(event, e.RequestArrived):
            self.requests[event.ordinal] = {region.name: region.initial for region in REGIONS}
        elif isinstance(event, _ISSUES_A_JOB):
            self.jobs[event.job_id] = {region.name: region.initial for region in JOB_REGIONS}

    def _walk(self, sequence: int, event: Any, record: RequestRecord | None) -> None:
        if isinstance(event, _ABOUT_A_JOB) and event.job_id in self.jobs:
            self._move(self.jobs[event.job_id], trigger_of(event), sequence)
        if record is not None:
            if not isinstance(event, e.RequestDecision) or self.projections.tracker.in_generation(event) is record:
                if isinstance(event, e.LookupRequested) and record.stale_generation == record.generation:
                    self._asked_stale.add(record.ordinal)
                self._move(self.requests[record.ordinal], trigger_of(event), sequence)
        else:
            self._walk_engine(sequence, event)

    def _walk_engine(self, sequence: int, event: Any) -> None:
        tracker, transfers = self.projections.tracker, self.projections.transfers
        if isinstance(event, e.CacheReset):
            for each in tracker:
                if self.requests[each.ordinal]["blocks"] is not BlocksRegion.NONE:
                    self._asked_stale.discard(each.ordinal)
                    self._move(self.requests[each.ordinal], "cache.reset/held", sequence)
        elif isinstance(event, e.StepScheduled):
            for ordinal, *_ in event.advanced:
                if tracker.of(ordinal) is not None:
                    self._move(self.requests[ordinal], "tokens.scheduled", sequence)
        elif isinstance(event, e.TransferReported):
            job = transfers.given_up(event.job_id)
            if job is not None and transfers.is_reported(job, event):
                self._move(self.jobs[event.job_id], "transfer.reported/whole", sequence)

    def _move(self, states: dict[str, State], trigger: str, sequence: int) -> None:
        for name, state in states.items():
            if self.reference.names(name, trigger):
                dest = self.reference.walk(name, state, trigger)
                if dest is None:
                    self.refused.append(f"{sequence}: {name} has no row for ({state}, {trigger})")
                else:
                    states[name] = dest

    def _compare_request(self, sequence: int, event: e.Event, record: RequestRecord) -> None:
        states = self.requests[record.ordinal]
        loads = [
            job
            for job in self.projections.transfers.of_life(record.ordinal)
            if job.kind is JobKind.LOAD and job.generation == record.generation
        ]
        is_stale = record.stale_generation == record.generation and record.ordinal not in self._asked_stale
        for name, flag in (
            (states["phase"] is record.state, True),
            (states["blocks"] is not BlocksRegion.NONE, record.holds_blocks),
            (states["blocks"] is BlocksRegion.LOADING, record.holds_blocks and bool(loads)),
            (states["first"] is FirstRegion.COMPUTES_FIRST, record.computes_first),
            (states["current"] is CurrentRegion.STALE, is_stale),
            (states["trust"] is TrustRegion.QUARANTINED, record.quarantined),
        ):
            if name != flag:
                self.different.append(f"{sequence} {event.id}: {record} is {states}")

    def _compare_jobs(self, sequence: int, event: e.Event) -> None:
        for job in self.projections.transfers:
            states = self.jobs[job.job_id]
            if (states["work"], states["source"]) != (
                WorkRegion.OVERDUE if job.is_asked_after else WorkRegion.ISSUED,
                SourceRegion.FENCED if job.is_fenced else SourceRegion.OWNED,
            ):
                self.different.append(f"{sequence} {event.id}: {job} is {states}")
        given_up = {job_id for job_id, states in self.jobs.items() if states["work"] is WorkRegion.GIVEN_UP}
        if given_up != set(self.projections.transfers.state.given_up):
            self.different.append(f"{sequence} {event.id}: given up are {sorted(given_up)}")


def check_regions(events: Iterable[tuple[int, e.Event]], configuration: LedgerConfiguration) -> None:
    """No region refuses anything, and each says what the projections say."""
    walked = WalkedRegions(configuration)
    walked.take(events)
    assert walked.refused == []
    assert walked.different == []
