"""Mutants of worker reports: counted twice, taken for all ranks, given to another life, or never asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvledger.adapters.vllm.metadata import WorkerReports
from kvledger.adapters.vllm.worker_side import WorkerSide
from kvledger.lifecycle import events as e
from kvledger.lifecycle import ledger
from kvledger.lifecycle.decisions import saves
from kvledger.lifecycle.projections.jobs import Jobs
from mutants.catalogue.parts import SAVING, decided_otherwise, wrapped
from mutants.mutant import Patch, Touch, mutant
from mutants.scenes import Walks, Worlds

SILENT = Worlds(
    faults=frozenset({"aborts", "storms", "dropped reports"}),
    connector=(("max_silent_steps", 6), ("max_silent_ms", 0)),
)
LATE = Worlds(
    faults=frozenset({"aborts", "storms", "delayed reports"}),
    connector=(("max_silent_steps", 64), ("max_silent_ms", 100)),
)


@mutant("COMPLETION_ONCE", "vllm#18246", "LMCache#3640", "vllm-ascend#16729", scene=Worlds())
def reported_again(touch: Touch) -> Sequence[Patch]:
    """A worker does not empty its list of finished copies, so it reports these copies again."""
    told: dict[int, tuple[Any, ...]] = {}

    def take_reports(original: Any, side: WorkerSide) -> WorkerReports | None:
        again = told.pop(id(side), ())
        reports = original(side)
        new = () if reports is None else reports.reports
        if again:
            touch()
        if new:
            told[id(side)] = new
        return WorkerReports((*again, *new)) if again or new else None

    return [wrapped(WorkerSide, "take_reports", take_reports)]


@mutant("RANK_AGREEMENT", "tpu-inference#3152", "vllm-ascend#16412", "vllm-omni#5636", scene=Walks())
def first_rank_for_all(touch: Touch) -> Sequence[Patch]:
    """As soon as one rank has reported a copy, the copy counts as reported by all ranks."""

    def is_reported(original: Any, jobs: Jobs, copy: Any) -> bool:
        if not original(jobs, copy) and (copy.ranks_done or copy.ranks_failed):
            touch()
            return True
        return bool(original(jobs, copy))

    return [wrapped(Jobs, "is_reported", is_reported)]


@mutant("RANK_AGREEMENT", "vllm#56104", scene=Walks())
def failure_taken_for_quiet(touch: Touch) -> Sequence[Patch]:
    """If one rank reports a failure, the job is settled as failed, though other ranks are still copying."""

    def is_reported(original: Any, jobs: Jobs, copy: Any) -> bool:
        if not original(jobs, copy) and copy.ranks_failed:
            touch()
            return True
        return bool(original(jobs, copy))

    return [wrapped(Jobs, "is_reported", is_reported)]


@mutant("GEN_ISOLATION", "vllm#51637", "vllm#49796", scene=LATE)
def completed_for_the_present_life(touch: Touch) -> Sequence[Patch]:
    """The end of a copy of an earlier generation is recorded for the request's current generation."""

    def settled(decision: e.Event, turn: Any, job: Any) -> e.Event:
        record = turn.projections.tracker.get(job.request_id)
        if record is None or not hasattr(decision, "generation") or decision.generation == record.generation:
            return decision
        touch()
        return msgspec.structs.replace(decision, ordinal=record.ordinal, generation=record.generation)

    return [decided_otherwise(ledger, "settle", settled)]


@mutant("LIVENESS", "vllm#46283", "vllm#56640", "LMCache#5047", scene=SILENT)
def silence_not_noticed(touch: Touch) -> Sequence[Patch]:
    """The connector never asks the workers about an overdue copy."""

    def overdue(original: Any, jobs: Jobs, step: int, now: int) -> list[Any]:
        if original(jobs, step, now):
            touch()
        return []

    return [wrapped(Jobs, "overdue", overdue)]


@mutant("RECORDED", "LMCache#2336", "vllm#46595", scene=Worlds())
def handler_raises(touch: Touch) -> Sequence[Patch]:
    """The handler that saves a resumed request raises an IndexError."""
    original = saves.save_settled

    def save_settled(turn: Any, *arguments: Any) -> None:
        if turn.record.num_preemptions:
            touch()
            raise IndexError("list index out of range")
        original(turn, *arguments)

    return [(owner, "save_settled", save_settled) for owner in SAVING]
