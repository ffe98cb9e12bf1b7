"""Every fact of a log has a rule that is shown to hold it, or a reason why none does."""

from __future__ import annotations

from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.facts import FACTS

CORE = Core.standard()
CLAIMS = [
    (event_id, field, rules)
    for event_id, fields in FACTS.items()
    for field, rules in fields.items()
    if not isinstance(rules, str)
]


def test_every_fact_of_the_vocabulary_is_listed() -> None:
    """A new field fails here until somebody has asked which rule verifies it."""
    listed = {event_id: set(fields) for event_id, fields in FACTS.items()}
    assert listed == {event_id: set(e.field_names(event)) for event_id, event in CORE.events.items()}


def test_only_rules_that_there_are_verify_facts() -> None:
    """And a reason is in words."""
    for _, _, rules in CLAIMS:
        assert set(rules) <= CORE.rules.keys()
    assert all(" " in why for fields in FACTS.values() for why in fields.values() if isinstance(why, str))
