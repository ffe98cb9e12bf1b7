"""What must be true of the ledger's belief after every single event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sized

from kvledger.lifecycle import RequestState
from kvledger.lifecycle.projections import Projections


def num_entries(projections: Projections) -> dict[str, int]:
    """Entries per projection that belong to requests: all are 0 when every request is released."""
    made = projections.named().items()
    return {name: len(its) for name, its in made if isinstance(its, Sized) and name != "pool"}


def check_slots(projections: Projections, given_up: Iterable[int] = ()) -> None:
    """Every slot is free or reachable, and nobody writes where another writes or reads.

    `given_up` are slots of saves that nobody reported: a slow worker may still write there, so they stay taken.
    Raises an AssertionError that names the broken sentence.
    """
    references: Counter[int] = Counter(given_up)
    for key in projections.pool:
        references.update(projections.pool.get(key) or ())
    for job in projections.jobs:
        references.update(job.slots)
    for record in projections.tracker:
        tail = record.tail
        if tail is not None and tail.is_saved:
            references.update(tail.slots)
    held = projections.slots.state.references
    assert held == dict(references), f"slots referenced {held}, reachable {dict(references)}"
    num_slots = projections.configuration.num_slots
    assert projections.slots.num_free + len(held) == num_slots, "free and referenced slots are not all slots"
    assert all(0 <= slot < num_slots for slot in held), f"slots outside the pool: {sorted(held)}"
    candidates = projections.slots.candidates(num_slots)
    assert len(candidates) == projections.slots.num_free, "not every free slot is offered"
    assert not set(candidates) & set(held), "a referenced slot is offered"
    written = [slot for job in projections.jobs if job.kind.value == "save" for slot in job.slots]
    assert len(written) == len(set(written)), "two saves in flight write one slot"
    read = {slot for job in projections.jobs if job.kind.value == "load" for slot in job.slots}
    assert not read & set(written), "a load in flight reads a slot that a save in flight writes"


def check_invariants(projections: Projections, given_up: Iterable[int] = ()) -> None:
    """What holds for requests that behave, slots included; see `check_slots`."""
    check_slots(projections, given_up)
    for record in projections.tracker:
        if record.state in {RequestState.PREEMPTED, RequestState.FINISHED}:
            assert not record.block_ids, f"{record.request_id} is {record.state} with blocks"
        if record.state is RequestState.FINISHED:
            assert projections.jobs.owes(record.ordinal), f"{record.request_id} is finished, owes nothing, stays"
    ordinals = {record.ordinal for record in projections.tracker}
    assert projections.lookup_cache.state.hits.keys() <= ordinals, "a lookup of a released request is remembered"
    if not ordinals:
        assert not any(v for k, v in num_entries(projections).items() if k != "jobs"), num_entries(projections)
