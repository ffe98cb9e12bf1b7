"""Whatever a connector might see, in whatever order, and the logs that a real ledger writes of it."""

from __future__ import annotations

from hypothesis import strategies as st

from kvledger.lifecycle import Core, Ledger, LedgerConfiguration
from kvledger.lifecycle import events as e
from lifecycle_driver.driver import keys_of
from lifecycle_driver.sink import MemorySink

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

SIZES = st.sampled_from([(8, 16), (16, 16), (32, 16)])
"""Tokens in a chunk and in a block."""


def arrivals_numbered(events: list[e.Event | str]) -> list[e.Event]:
    """The same with an arrival for each name, numbered as vLLM would."""
    numbered: list[e.Event] = []
    num_arrived = 0
    for event in ["a", "b", *events]:
        if isinstance(event, str):
            numbered.append(e.RequestArrived(event, num_arrived, 40, 1))
            num_arrived += 1
        else:
            numbered.append(event)
    return numbered


@st.composite
def any_log(draw: st.DrawFn) -> tuple[LedgerConfiguration, list[e.Event]]:
    """Observations in any order with what a real ledger decided upon them."""
    chunk_size, block_size = draw(SIZES)
    num_ranks = draw(st.integers(1, 2))
    configuration = LedgerConfiguration(block_size, chunk_size, num_slots=3, num_ranks=num_ranks, max_silent_steps=3)
    sink = MemorySink()
    ledger = Ledger(Core.standard(), configuration, sink)
    for event in arrivals_numbered(draw(st.lists(observations, max_size=40))):
        ledger.observe(event)
    ledger.commit()
    return configuration, [event for _, event in sink.events()]
