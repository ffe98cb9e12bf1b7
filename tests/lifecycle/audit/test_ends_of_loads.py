"""Which load a life waits for: an earlier one of it may be reported later."""

from __future__ import annotations

from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import events as e

KEYS = keys_of("document", 4)


def test_a_load_within_a_step_that_is_reported_late_is_not_the_end_that_a_preempted_request_waits_for() -> None:
    """In world 202298 of `make sim` its report came after the request had been preempted and loaded again."""
    driver = Driver(chunk_size=16, async_load_tokens=48)
    driver.save_prefix("earlier", KEYS)
    driver.arrive("a", 70, KEYS)
    driver.lookup("a", 32, 70)
    driver.allocate("a", range(5), 32)
    within_the_step = driver.all_of(e.LoadIssued)[-1]
    assert not within_the_step.is_async
    driver.observe(e.EffectsDelivered((within_the_step.job_id,), (), (), (), (), (), ()))
    driver.observe(e.HooksExchanged())
    driver.step(("a", 64, 6, 70))
    driver.preempt("a", 64)
    driver.lookup("a", 0, 71)
    driver.allocate("a", range(5, 10), 64)
    outside = driver.all_of(e.LoadIssued)[-1]
    assert outside.is_async
    driver.step()
    driver.report(within_the_step.job_id)
    for _ in range(3):
        driver.step()
    assert [violation.rule for violation in driver.audited().violations if violation.rule == "DELIVERED_ONCE"] == []
    driver.report(outside.job_id)
    for _ in range(3):
        driver.step()
    (violation,) = (each for each in driver.audited().violations if each.rule == "DELIVERED_ONCE")
    assert "must be reported as received" in violation.detail
