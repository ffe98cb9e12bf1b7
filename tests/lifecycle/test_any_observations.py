"""Whatever the connector sees, in whatever order: nothing raises, nothing leaks, everything replays."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from lifecycle_driver import MemorySink, check_invariants, check_slots, keys_of
from lifecycle_driver.concerned import check_reasons

from kvledger.lifecycle import Core, Ledger, LedgerConfiguration, Replay, fold
from kvledger.lifecycle import events as e

names = st.sampled_from(["a", "b"])
tokens = st.integers(0, 70)
blocks = st.lists(st.integers(0, 9), max_size=5).map(tuple)
ordinals = st.integers(0, 4)
ranks = st.lists(st.integers(0, 2), max_size=2)
KEYS = keys_of("d", 3) + keys_of("other", 3)


def reported(
    job_ids: list[int], ranks_done: list[int], ranks_failed: list[int], is_repeated: bool
) -> e.TransferReported:
    """A report of some jobs by some ranks; the same job may stand in it twice, and none may."""
    num_bytes = (100,) * len(job_ids)
    return e.TransferReported(
        tuple(job_ids), tuple(ranks_done), tuple(ranks_failed), is_repeated, num_bytes, 10, "", "", 1
    )


observations = st.one_of(
    st.builds(e.ChunkKeysObserved, names, st.integers(0, 3), st.lists(st.sampled_from(KEYS), max_size=4).map(tuple)),
    st.builds(e.LookupRequested, names, tokens, tokens, st.just(1)),
    st.builds(e.BlocksAllocated, names, blocks, tokens, st.just(1)),
    st.builds(e.BlockTableObserved, names, blocks, st.just(1)),
    st.builds(e.RequestPreempted, names, tokens, tokens, st.just(1), st.booleans()),
    st.builds(e.SessionContinued, names, tokens, tokens, tokens, st.just(1)),
    st.builds(e.TokensRolledBack, names, tokens, st.just(1)),
    st.builds(e.RequestFinished, names, st.just("FINISHED_ABORTED"), tokens, tokens, st.just(1), st.booleans()),
    st.builds(
        e.StepScheduled,
        st.just(0),
        tokens,
        st.lists(st.tuples(ordinals, tokens, tokens, tokens), max_size=2).map(tuple),
        st.lists(ordinals, max_size=2).map(tuple),
        st.lists(st.tuples(ordinals, blocks), max_size=2).map(tuple),
        st.lists(
            st.builds(e.SettledTokens, ordinals, st.integers(0, 3), tokens, st.integers(-1, 60)), max_size=2
        ).map(tuple),
        st.just(1),
    ),
    st.builds(reported, st.lists(st.integers(0, 6), max_size=3), ranks, ranks, st.booleans()),
    st.builds(e.CacheReset, st.just(1)),
    st.builds(e.HookFailed, st.just("hook"), names, st.just("boom"), st.just(1)),
    st.builds(e.DecisionWithheld, names, st.sampled_from(["", "VLLM_CONTRACT"]), st.just("no"), st.just(1)),
    st.builds(e.LogNote, st.just("note"), st.just(1)),
    st.builds(lambda name: name, names),  # an arrival, numbered when it happens
)  # fmt: skip


@settings(max_examples=300)
@given(
    events=st.lists(observations, max_size=40),
    sizes=st.sampled_from([(8, 16), (16, 16), (32, 16)]),
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
    num_arrived = 0
    for event in ["a", "b", *events]:
        if isinstance(event, str):
            observed: e.Event = e.RequestArrived(event, num_arrived, 40, 1)
            num_arrived += 1
        else:
            observed = event
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
