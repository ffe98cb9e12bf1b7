"""Nothing remembers a request that has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sized
from typing import TYPE_CHECKING, Any

import msgspec
from lifecycle_driver.invariants import num_entries

if TYPE_CHECKING:
    from kvledger.adapters.vllm.scheduler_side import SchedulerSide
    from kvledger.lifecycle.projections import Projections
    from sim.world import World

MAY_STAY = frozenset(
    {
        # The host pool: chunks, in which slots they lie, and which are free.
        "Pool.state.committed",
        "Pool.state.parent_of",
        "HostSlots.state.free",
        "HostSlots.state.failed",
        "HostSlots.state.references",
        # What the last report was of.
        "Owed.reported",
        "Owed.late_ends",
        # Blocks that nobody has written since a load failed, and the tables lost in the last two steps.
        "UnfilledBlocks.blocks",
        "UnfilledBlocks.lost",
        "UnfilledBlocks.lost_before_step",
        # What steps and loads took (bounded).
        "TokenCosts.state.samples",
        "TokenCosts.state.steps",
        "TokenCosts.state.loads",
        # Saves that no worker reported, whose slots are never used again.
        "Jobs.given_up",
        "Owed.state.copies",
        # Steps to come at which a request was to be looked at (bounded).
        "StepReader._due",
        "WorkerSide._executed",
        # What KV events have said of the host pool, and will say when the log is written (never more than it holds).
        "CacheEvents._stored",
        "CacheEvents._published",
        "CacheEvents._num_chunks",
        # vLLM asks for KV events after a step's output, so what a later reset removes waits for the next step.
        "CacheEvents._removed",
    }
)


def check_nothing_left(world: World) -> None:
    """No container of the projections, of the adapter or of the worker holds anything of a request that has ended.

    Verifies: every container there is, found by walking the objects, but those of `MAY_STAY`; every slot that is not
    free belongs to a chunk, or to a save that was given up.
    Does not verify: what is left in the middle of a life, and vLLM's own structures.
    """
    entries = num_entries(world.side.ledger.projections)
    assert not any(entries.values()), f"entries of ended requests: {entries}"
    left = left_entries(world.side, world.engine.worker)
    assert not left, f"left behind: {left}"
    check_slots(world.side.ledger.projections)
    check_nodes(world.side.ledger.projections)


def left_entries(side: SchedulerSide, worker: Any) -> dict[str, int]:
    """Class and attribute -> entries, of every container that should be empty when no request is alive."""
    projections = side.ledger.projections
    parts = [getattr(projections, name) for name in vars(projections)]
    parts += [projections.slots, side, side.journal, side.request_reader, side._step_reader, side.ledger]
    parts += [side._cache_events, side._early_ends, worker._worker_side]
    left = {}
    for part in parts:
        if not type(part).__module__.startswith("kvledger") or not hasattr(part, "__dict__"):
            continue
        state = getattr(part, "state", None)
        fields = {} if not isinstance(state, msgspec.Struct) else msgspec.structs.asdict(state)
        for name, value in (vars(part) | {f"state.{name}": value for name, value in fields.items()}).items():
            where = f"{type(part).__name__}.{name}"
            if isinstance(value, dict | list | set | tuple) and _changes(name) and where not in MAY_STAY and value:
                left[where] = len(value)
    return left


def _changes(name: str) -> bool:
    """Whether a container is of the kind that requests come into and leave; some are fixed from the start."""
    fixed = {"_phase", "_request_events"}
    return name not in fixed | {"_table", "_engines", "all_ranks", "_pools", "_hashes"}


def check_slots(projections: Projections) -> None:
    """Count the references on slots again, from what may hold them."""
    chunks, jobs = projections.pool, projections.jobs
    expected = Counter(slot for key in chunks for slot in chunks.get(key) or ())
    expected.update(slot for job in jobs.given_up.values() for slot in job.slots)
    references: dict[int, int] = chunks.slots.state.references
    assert references == dict(expected), "slots are held by nobody, or held and not counted"
    free: Sized = set(chunks.slots.candidates(chunks.slots.num_free))
    assert len(free) == chunks.slots.num_slots - len(references), "slots are neither free nor held"


def check_nodes(projections: Projections) -> None:
    """Nobody holds anything, and each prefix that the pool knows ends with a chunk, or with the place of one."""
    state = projections.pool.state
    ends = state.parent_of.keys() - set(state.parent_of.values())
    assert ends <= state.committed.keys() | set(state.queue), "keys of chunks that left are remembered"
    assert not projections.pool.forest._num_holders, "chunks are held by nobody"
