"""Who is evicted first, as the audit computes it; and where it says nothing."""

from __future__ import annotations

from typing import Any

from lifecycle_driver import Driver
from lifecycle_driver.driver import keys_of

from kvledger.lifecycle import Core, Extension
from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.pool import Recency


def story_of_a_load(core: Core | None = None) -> Driver:
    """Three chunks fill the pool; the oldest is loaded, and another request evicts one."""
    driver = Driver(chunk_size=16, num_slots=3, save_tails=False, **({} if core is None else {"core": core}))
    for number, name in enumerate(("loaded", "older", "younger")):
        driver.save_prefix(name, keys_of(name, 1), first_block=10 * number)
    driver.arrive("reader", 17, keys_of("loaded", 1))
    driver.allocate("reader", (50, 51), driver.lookup("reader", 0, 17).num_external_tokens)
    driver.step(("reader", 16, 1, 17))
    driver.settle_all()
    driver.start("new", keys_of("new", 1), 17, (60, 61))
    driver.step(settled=[("new", 0, 16)])
    driver.settle_all()
    driver.ledger.commit()
    return driver


def test_a_chunk_that_was_loaded_is_younger_than_one_that_was_only_saved() -> None:
    """The order of saves alone would evict it."""
    driver = story_of_a_load()
    assert [key for event in driver.all_of(e.ChunksEvicted) for key in event.keys] == list(keys_of("older", 1))
    assert driver.audited().violations == []


def test_an_order_of_saves_alone_is_named_although_the_projection_that_verifies_has_it_too(monkeypatch: Any) -> None:
    """The log was called sound: one mistake evicted the chunk and found nothing wrong with that."""
    monkeypatch.setattr(Recency, "touch_prefix", lambda *_: None)
    driver = story_of_a_load()
    assert [key for event in driver.all_of(e.ChunksEvicted) for key in event.keys] == list(keys_of("loaded", 1))
    (violation,) = driver.audited().violations
    assert violation.rule == "EVICTION_ORDER"
    assert keys_of("older", 1)[0].hex() in violation.detail


def test_an_extension_that_says_what_is_evicted_last_takes_the_rule_away() -> None:
    """What it kept is not in the log."""

    class Keeping(Extension):
        name = "keeping"

        def kept(self, _projections: Any) -> frozenset[bytes]:
            return frozenset(keys_of("older", 1))

    core = Core.standard().extended(Keeping())
    driver = story_of_a_load(core)
    assert [key for event in driver.all_of(e.ChunksEvicted) for key in event.keys] == list(keys_of("younger", 1))
    assert driver.audited(core=core).violations == []
    assert core.not_checked["EVICTION_ORDER"] == "extension keeping says what is evicted last"
