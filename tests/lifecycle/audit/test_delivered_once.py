"""DELIVERED_ONCE: what leaves the ledger is owed and leaves once, by the audit's own account."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import Channel
from kvledger.lifecycle import events as e

WORKERS, VLLM = Channel.WORKERS, Channel.VLLM


def found(driver: Driver, change: Callable[[e.EffectsDelivered], e.EffectsDelivered] | None = None) -> list[str]:
    """What the rule finds in the log, the first delivery that can be altered so, altered."""
    driver.ledger.commit()
    events = driver.sink.events()
    for place, (sequence, event) in enumerate(events):
        if change is not None and isinstance(event, e.EffectsDelivered) and change(event) != event:
            events[place] = sequence, change(event)
            break
    else:
        assert change is None, "nothing was altered"
    audit = driver.audited(events)
    assert {violation.rule for violation in audit.violations} <= {"DELIVERED_ONCE"}
    return [violation.detail for violation in audit.violations]


def moved(source: str, dest: str) -> Callable[[e.EffectsDelivered], e.EffectsDelivered]:
    """What stands in one field stands in another."""

    def change(event: e.EffectsDelivered) -> e.EffectsDelivered:
        told = getattr(event, source)
        return msgspec.structs.replace(event, **{source: (), dest: told}) if told else event

    return change


def twice(name: str) -> Callable[[e.EffectsDelivered], e.EffectsDelivered]:
    """All of a field twice."""
    return lambda event: msgspec.structs.replace(event, **{name: getattr(event, name) * 2})


@pytest.fixture
def told() -> Driver:
    """An asynchronous load that came through, one that failed, one that was refused, and a delayed free."""
    driver = Driver(chunk_size=16, async_load_tokens=16, async_saves=True)
    for outcome in ("done", "failed", "refused"):
        name, keys = f"reader {outcome}", keys_of(outcome, 2)
        driver.save_prefix(f"writer {outcome}", keys)
        driver.deliver(WORKERS)
        driver.arrive(name, 33, keys)
        answer = driver.lookup(name, 0, 33)
        assert answer.is_async
        if outcome == "refused":
            driver.observe(e.LoadRefused(name, (1, 2, 3), 1))
        else:
            driver.allocate(name, (1, 2, 3), answer.num_external_tokens)
        for job in driver.deliver(WORKERS).jobs:
            driver.report(job.job_id, ok=outcome == "done")
        driver.deliver(VLLM)
        driver.deliver(WORKERS)
        driver.deliver(VLLM, reported=[name])
        driver.finish(name, 0, 33)
    driver.start("ends", keys_of("other", 2), 33, range(50, 53))
    driver.finish("ends", 33, 34)
    for job in driver.deliver(WORKERS).jobs:
        driver.report(job.job_id)
    driver.deliver(WORKERS)
    driver.deliver(VLLM, reported=["ends"])
    return driver


def test_a_log_in_which_all_is_handed_over_once_keeps_the_rule(told: Driver) -> None:
    """And each kind of delivery is in it."""
    assert found(told) == []
    assert not told.projections.owed.is_owing
    events = [event for _, event in told.sink.events() if isinstance(event, e.EffectsDelivered)]
    assert all(
        any(getattr(event, name) for event in events) for name in ("job_ids", "received", "failed", "sent", "reported")
    )


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (twice("job_ids"), "is handed out a second time"),
        (lambda event: msgspec.structs.replace(event, job_ids=(*event.job_ids, 99)), "no such job is in flight"),
        (lambda event: msgspec.structs.replace(event, awaited=(1,)), "but no reminder was decided"),
        (lambda event: msgspec.structs.replace(event, block_ids=(1,)), "no load was to"),
        (lambda event: msgspec.structs.replace(event, sent=(0,)), "not kept for a copy"),
        (lambda event: msgspec.structs.replace(event, received=(0,)), "waits for no load"),
        (moved("received", "failed"), "ended as received"),
        (moved("failed", "received"), "ended as failed"),
        (twice("received"), "waits for no load"),
        (twice("failed"), "waits for no load"),
        (twice("sent"), "not kept for a copy"),
    ],
)
def test_what_is_handed_over_wrongly_is_found(
    told: Driver, change: Callable[[e.EffectsDelivered], e.EffectsDelivered], detail: str
) -> None:
    """Twice, to nobody, or as something else."""
    assert detail in found(told, change)[0]
