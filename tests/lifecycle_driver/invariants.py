"""What must be true of the ledger's belief after every single event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvledger.lifecycle import RequestState
from kvledger.lifecycle.projections import Projections


def check_slots(projections: Projections, given_up: Iterable[int] = ()) -> None:
    """Every slot is free or reachable, and nobody writes where another writes or reads.

    `given_up` are slots of saves that nobody reported: a slow worker may still write there, so they stay taken.
    Raises an AssertionError that names the broken sentence.
    """
    snapshot = projections.chunks.snapshot()
    assert isinstance(snapshot, dict)
    references: Counter[int] = Counter(given_up)
    for _, slots in snapshot["committed"]:
        references.update(slots)
    for job in projections.transfers:
        references.update(job.slots)
    for record in projections.tracker:
        tail = projections.tails.saved(record.ordinal)
        if tail is not None:
            references.update(tail.slots)
    held = snapshot["slots"]["references"]
    assert held == dict(references), f"slots referenced {held}, reachable {dict(references)}"
    num_slots = projections.configuration.num_slots
    assert snapshot["slots"]["free"] + len(held) == num_slots, "free and referenced slots are not all slots"
    assert all(0 <= slot < num_slots for slot in held), f"slots outside the pool: {sorted(held)}"
    candidates = projections.chunks.slots.candidates(num_slots)
    assert len(candidates) == snapshot["slots"]["free"], "not every free slot is offered"
    assert not set(candidates) & set(held), "a referenced slot is offered"
    written = [slot for job in projections.transfers if job.kind.value == "save" for slot in job.slots]
    assert len(written) == len(set(written)), "two saves in flight write one slot"
    read = {slot for job in projections.transfers if job.kind.value == "load" for slot in job.slots}
    assert not read & set(written), "a load in flight reads a slot that a save in flight writes"


def check_invariants(projections: Projections, given_up: Iterable[int] = ()) -> None:
    """What holds for requests that behave, slots included; see `check_slots`."""
    check_slots(projections, given_up)
    for record in projections.tracker:
        if record.state in {RequestState.PREEMPTED, RequestState.FINISHED}:
            assert not projections.blocks.held(record.request_id), f"{record.request_id} is {record.state} with blocks"
        if record.state is RequestState.FINISHED:
            assert projections.transfers.owes(record.ordinal), f"{record.request_id} is finished, owes nothing, stays"
    known = {record.request_id for record in projections.tracker}
    parts = projections.snapshot()
    for name in ("blocks", "chunk_keys", "save_cursor"):
        part = parts[name]
        assert isinstance(part, dict)
        assert set(part) <= known, f"{name} remembers released requests: {sorted(set(part) - known)}"
    snapshot = projections.chunks.snapshot()
    assert isinstance(snapshot, dict)
    assert set(snapshot["pinned"]) <= known, "a released request pins chunks"
    lookups = parts["lookups"]
    assert isinstance(lookups, dict)
    assert set(lookups["hits"]) | set(lookups["pending"]) <= known, "a lookup of a released request is remembered"
    if not known:
        assert not any(v for k, v in projections.num_entries().items() if k != "transfers"), projections.num_entries()
