"""Whatever the connector sees, in whatever order: nothing raises, nothing leaks, everything replays."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from lifecycle_driver import MemorySink, check_invariants, check_slots
from lifecycle_driver.any_events import SIZES, arrivals_numbered, observations
from lifecycle_driver.concerned import check_reasons

from kvledger.lifecycle import Core, Ledger, LedgerConfiguration, Replay, fold
from kvledger.lifecycle import events as e


@settings(max_examples=100)
@given(
    events=st.lists(observations, max_size=40),
    sizes=SIZES,
    num_ranks=st.integers(1, 2),
)
def test_no_order_of_observations_makes_the_ledger_raise_or_leak(
    events: list[e.Event | str], sizes: tuple[int, int], num_ranks: int
) -> None:
    """The engine's life never depends on what a hook was told; slots and reasons add up; replay agrees."""
    chunk_size, block_size = sizes
    configuration = LedgerConfiguration(block_size, chunk_size, num_slots=3, num_ranks=num_ranks, max_silent_steps=3)
    sink = MemorySink()
    ledger = Ledger(Core.standard(), configuration, sink)
    given_up: list[int] = []
    slots: dict[int, tuple[int, ...]] = {}
    for observed in arrivals_numbered(events):
        for decision in ledger.observe(observed):
            if isinstance(decision, e.SaveIssued):
                slots[decision.job_id] = decision.slots
            elif isinstance(decision, e.SaveFailed) and not decision.quiet:
                given_up += slots[decision.job_id]
        check_slots(ledger.projections, given_up)
        if not any(record.trust == "quarantined" for record in ledger.projections.tracker):
            check_invariants(ledger.projections, given_up)  # illegal events may leave a quarantined request odd
    ledger.commit()
    log = sink.events()
    assert fold(Core.standard(), log, configuration).snapshot() == ledger.projections.snapshot()
    replay = Replay(Core.standard(), configuration, reference=Core.standard().reference)
    replay.run(log)
    assert (replay.divergences, replay.reference_differences) == ([], [])
    check_reasons(log, configuration)
