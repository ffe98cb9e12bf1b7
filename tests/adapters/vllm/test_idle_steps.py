"""Steps that schedule nobody: an engine that waits for a copy makes them in a loop, and the log does not grow."""

from __future__ import annotations

from typing import Any

import pytest
from sim.slow_copies import slow_down

from kvledger.adapters.lab.simulation.clock import SimulatedClock
from kvledger.adapters.vllm import KVLedgerConnector
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

PROMPT = range(64)


def waiting(make_engine: Any, **options: Any) -> tuple[Any, Any]:
    """An engine whose only request waits for its load, and the copies of its worker."""
    defaults = {"num_blocks": 40, "chunk_size": 8, "enable_prefix_caching": False, "load_mode": "async"}
    engine = make_engine(**(defaults | options))
    engine.serve("writer", PROMPT, 2)
    (copies,) = slow_down(engine, "load")
    engine.add("reader", PROMPT, 2)
    engine.step()
    assert copies.pending()
    return engine, copies


def test_an_engine_that_waits_for_a_copy_writes_nothing(make_engine: Any) -> None:
    """A thousand steps while a load is under way leave no event; then it goes on."""
    clock = SimulatedClock()
    with clock.read_by(KVLedgerConnector):
        engine, copies = waiting(make_engine, max_silent_ms=600_000)
    for _ in range(3):  # what was handed over with the first of them is recorded
        engine.step()
    num_events = len(engine.events())
    for _ in range(1000):
        engine.step()
    assert len(engine.events()) == num_events
    copies.started[-1].finish()
    engine.run()
    assert len(engine.logged(e.LoadCompleted, request_id="reader")) == 1
    steps = [step.step for step in engine.logged(e.StepScheduled)]
    assert steps == list(range(len(steps)))


def test_a_copy_that_nobody_reports_is_asked_after_by_an_engine_that_waits(make_engine: Any) -> None:
    """Overdue is counted in steps and time; the steps that are written are enough for both."""
    clock = SimulatedClock()
    with clock.read_by(KVLedgerConnector):
        engine, copies = waiting(make_engine, max_silent_ms=100, max_silent_steps=10)
    num_steps = len(engine.logged(e.StepScheduled))
    for _ in range(130):
        clock.pass_ms(1)
        engine.step()
    assert copies.started[-1].was_waited_for, "the worker finishes what it is asked after"
    assert len(engine.logged(e.StepScheduled)) - num_steps < 20
    engine.run()
    assert len(engine.logged(e.TransferAwaited)) == 1
    assert len(engine.logged(e.LoadCompleted, request_id="reader")) == 1
