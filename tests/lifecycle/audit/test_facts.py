"""Every fact of a log has a rule that is shown to hold it, or a reason why none does."""

from __future__ import annotations

import pytest
from lifecycle_driver import Driver, Walk, keys_of
from lifecycle_driver.wrong_values import wrong_logs

from kvledger.lifecycle import Channel, Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.facts import FACTS
from kvledger.lifecycle.replay import SequencedEvent

CORE = Core.standard()
CLAIMS = {
    (event_id, field): set(rules)
    for event_id, fields in FACTS.items()
    for field, rules in fields.items()
    if not isinstance(rules, str)
}


def test_every_fact_of_the_vocabulary_is_listed() -> None:
    """A new field fails here until somebody has asked which rule verifies it."""
    listed = {event_id: set(fields) for event_id, fields in FACTS.items()}
    assert listed == {event_id: set(e.field_names(event)) for event_id, event in CORE.events.items()}


def test_only_rules_that_there_are_verify_facts() -> None:
    """And a reason is in words."""
    assert set().union(*CLAIMS.values()) <= CORE.rules.keys()
    assert all(" " in why for fields in FACTS.values() for why in fields.values() if isinstance(why, str))


def further_story() -> tuple[Driver, list[SequencedEvent]]:
    """What the others leave out: a refused and a failed load, unfilled blocks, a quarantine, what an extension does."""
    driver = Driver(chunk_size=16, num_slots=16, max_failed_loads=1)
    keys = keys_of("a", 2)
    driver.save_prefix("earlier", keys)
    driver.arrive("whole", 32, keys)
    driver.lookup("whole", 0, 32)
    driver.arrive("b", 17, keys_of("b", 1))
    driver.lookup("b", 0, 17)
    driver.allocate("b", (17, 18))
    driver.observe(e.LoadRefused("b", (17, 18), 89))
    driver.step(("b", 0, 17, 17))
    driver.deliver(Channel.WORKERS)
    driver.arrive("a", 33, keys)
    driver.lookup("a", 0, 33)
    driver.allocate("a", (1, 2, 3), 32)
    driver.step(("a", 32, 1, 33), ("b", 17, 1, 18))
    driver.report(driver.all_of(e.LoadIssued)[-1].job_id, ok=False)
    driver.observe(e.LoadErrorsObserved((1, 2), 90))
    driver.roll_back("a", 0)
    driver.step(("a", 0, 33, 33))
    driver.observe(e.WindowLeft("a", 0, 91))
    driver.observe(e.BlockTableObserved("a", (1, 2, 3), 92))
    for kind in ("observed", "decided", "stopped"):
        driver.observe(e.LogNote(kind, 93))
    for request_id in ("a", "b", "whole"):
        driver.finish(request_id, 16, 34)
    driver.settle_all()
    driver.step()
    for request_id, is_load, stored in (("c", False, ()), ("d", True, (5, 6))):
        driver.start(request_id, keys, 33, range(40, 43))
        driver.observe(e.PagesDigested(*driver.record(request_id).life, 0, is_load, 0, 0, (5, 6), stored, 94))
        driver.finish(request_id, 16, 34)
        driver.settle_all()
    driver.ledger.commit()
    recorded = driver.sink.events()
    (cause,) = [its for its, event in recorded if isinstance(event, e.LogNote) and event.text == "observed"]
    of_extension = {
        "observed": e.ExtensionObserved("a", "nobodys", "seen", 1, b"", 93),
        "decided": e.ExtensionDecided("a", 3, 1, "nobodys", "done", 1, b"", cause),
        "stopped": e.ExtensionStopped("nobodys", 1, "kept", "ValueError in line 1", cause),
    }
    return driver, [
        (sequence, of_extension[event.text] if isinstance(event, e.LogNote) else event) for sequence, event in recorded
    ]


@pytest.mark.long
def test_each_rule_that_a_fact_names_names_a_log_in_which_that_fact_alone_is_another(
    story: Driver, asynchronous: Driver, groups: Driver, reading: Driver
) -> None:
    """Wrong values are put into stories and walks until each rule has spoken; relying on a fact is not enough."""
    walks = [Walk(seed, chunk_size=(8, 16, 32)[seed % 3], block_size=16) for seed in range(12)]
    for walk in walks:
        walk.run(40)
        walk.driver.ledger.commit()
    unshown = {fact: set(rules) for fact, rules in CLAIMS.items()}
    logs = [
        (each, each.sink.events()) for each in (story, asynchronous, groups, reading, *(walk.driver for walk in walks))
    ]
    for driver, events in (further_story(), *logs):
        right = driver.audited(events).num_violations
        for wrong in wrong_logs(events, max_occurrences=8):
            missing = unshown.get((wrong.event_id, wrong.field))
            if missing:
                named = driver.audited(wrong.events).num_violations
                missing -= {rule for rule in missing if named[rule] > right[rule]}
    assert {fact: rules for fact, rules in unshown.items() if rules} == {}
