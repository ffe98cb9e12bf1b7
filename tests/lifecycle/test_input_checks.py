"""`Ledger(..., checks_input=True)` refuses what an embedder gets wrong; the log of what it accepts is the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from lifecycle_driver import MemorySink, keys_of

from kvledger.lifecycle import Core, Ledger, LedgerConfiguration, Scheduled, StepEncoder
from kvledger.lifecycle import events as e

CONFIGURATION = LedgerConfiguration(block_size=16, chunk_size=16, num_slots=8)


def observed(*, checks_input: bool) -> tuple[Ledger, MemorySink]:
    """A ledger in which a request of 100 tokens has computed 40; it loads nothing."""
    sink = MemorySink()
    ledger = Ledger(Core.standard(), CONFIGURATION, sink, checks_input=checks_input)
    for event in (
        e.RequestArrived("a", 0, 100, 1),
        e.ChunkKeysObserved("a", 0, tuple(keys_of("a", 6))),
        e.LookupRequested("a", 0, 100, 2),
        e.BlocksAllocated("a", tuple(range(1, 8)), 0, 3),
    ):
        ledger.observe(event)
    ledger.observe(StepEncoder(ledger.projections).encode([Scheduled("a", 0, 40, num_tokens=100)], 4))
    return ledger, sink


@dataclass
class Wrong:
    """An event that is refused, and what the error says."""

    event: Any
    said: str


WRONG = [
    Wrong(e.RequestArrived("d", 1, "40", 5), r"^RequestArrived.num_prompt_tokens is '40': Expected `int`, got `str`"),  # type: ignore[arg-type]
    Wrong(e.RequestArrived("d", 1, None, 5), r"^RequestArrived.num_prompt_tokens is None: Expected `int`"),  # type: ignore[arg-type]
    Wrong(e.RequestArrived("d", 1, object(), 5), r"^RequestArrived.num_prompt_tokens is <object .*unsupported"),  # type: ignore[arg-type]
    Wrong(e.RequestArrived(b"d", 1, 40, 5), r"^RequestArrived.request_id is b'd': Expected `str`, got `bytes`"),  # type: ignore[arg-type]
    Wrong(e.RequestArrived("d", 1, -5, 5), r"^RequestArrived.num_prompt_tokens is -5: it is negative; pass 0 or more$"),
    Wrong(e.RequestArrived("d", 1, 40, -1), r"^RequestArrived.time_ns is -1: Expected `int` >= 0"),
    Wrong(e.RequestArrived("d", 99, 40, 5), r"^RequestArrived.ordinal is 99: the next ordinal is 1; pass ledger"),
    Wrong(
        e.RequestArrived("d", 0, 40, 5),
        r"^RequestArrived.ordinal is 0: the next ordinal is 1; pass ledger.next_ordinal",
    ),
    Wrong(e.ChunkKeysObserved("a", 0, ("k",)), r"^ChunkKeysObserved.keys is \('k',\): Expected `bytes`, got `str`"),  # type: ignore[arg-type]
    Wrong(e.BlocksAllocated("a", (1, -2), 0, 5), r"^BlocksAllocated.block_ids is \(1, -2\): Expected `int` >= 0"),
    Wrong(e.RequestPreempted("a", 96, 100, 5), "^RequestPreempted.num_settled_tokens is 96: only .* were computed"),
    Wrong(e.RequestPreempted("a", 40, 100, 5, False, -2), r"^RequestPreempted.num_in_flight_tokens is -2: it is negat"),
    Wrong(
        e.RequestFinished("a", "", 41, 100, 5),
        "^RequestFinished.num_settled_tokens is 41: only 40 tokens were computed or loaded",
    ),
    Wrong(e.RequestReleased("a", 0, 0, 1), "^RequestReleased is no observation; pass an event of kvledger"),  # type: ignore[call-arg]
    Wrong("hello", "^'hello' is no observation; pass an event of kvledger.lifecycle.events that is not a decision$"),
    Wrong({"a": 1}, "^{'a': 1} is no observation; pass an event"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.said[:40])
def test_a_wrong_event_is_refused_with_its_field_and_nothing_is_recorded(wrong: Wrong) -> None:
    """The next event is recorded as if the wrong one had not come."""
    ledger, _ = observed(checks_input=True)
    next_sequence, before = ledger.next_sequence, ledger.projections.snapshot()
    with pytest.raises(ValueError, match=wrong.said):
        ledger.observe(wrong.event)
    assert (ledger.next_sequence, ledger.projections.snapshot()) == (next_sequence, before)
    ledger.observe(e.RequestPreempted("a", 40, 100, 5))


def test_the_log_is_the_same_with_and_without_the_checks() -> None:
    """Events that pass are neither copied nor changed."""
    logs = []
    for checks_input in (False, True):
        ledger, sink = observed(checks_input=checks_input)
        ledger.observe(e.RequestPreempted("a", 40, 100, 5, num_in_flight_tokens=e.NOT_RECORDED))
        ledger.observe(e.RequestArrived("b", ledger.next_ordinal, 40, 6))
        ledger.commit()
        logs.append(sink.events())
    assert logs[0] == logs[1]


def test_loaded_tokens_may_be_settled_before_a_step_computes_any() -> None:
    """They were cached or loaded when the request got its blocks."""
    ledger, _ = observed(checks_input=True)
    ledger.observe(e.RequestArrived("b", 1, 100, 5))
    ledger.observe(e.LookupRequested("b", 32, 100, 6))
    ledger.observe(e.BlocksAllocated("b", tuple(range(11, 18)), 0, 7))
    ledger.observe(e.RequestPreempted("b", 32, 100, 8))


def test_without_the_checks_any_ordinal_is_recorded() -> None:
    """A part of a log that is run again has arrivals whose ordinals have gaps."""
    ledger, _ = observed(checks_input=False)
    ledger.observe(e.RequestArrived("d", 99, 40, 5))
    assert ledger.projections.tracker.ordinal("d") == 99
