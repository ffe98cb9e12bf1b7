"""The connector under test is the real one, configured as the header of a log says, called as vLLM calls it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.adapters.lab.repro import record, rerun
from kvledger.lifecycle import LedgerConfiguration
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

SMALL = LedgerConfiguration(block_size=16, chunk_size=16, num_slots=8)


def test_the_example_of_the_documents_runs() -> None:
    """`docs/repro.md`, by hand."""
    text = (Path(__file__).parents[4] / "docs" / "repro.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(compile(example, "example", "exec"), namespace)  # noqa: S102 -- it is ours
    kinds = [type(event) for _, event in namespace["events"] if not event.is_decision]
    assert kinds == [
        e.LogNote,
        e.RequestArrived,
        e.ChunkKeysObserved,
        e.LookupRequested,
        e.BlocksAllocated,
        e.HooksExchanged,
        e.StepScheduled,
    ]


def test_equal_keys_are_equal_again() -> None:
    """Two requests that shared a chunk share it through the hooks: the second one's tokens hash to the saved key."""
    driver = Driver(chunk_size=16, block_size=16)
    driver.save_prefix("writer", keys_of("shared", 2))
    driver.arrive("reader", 40)
    driver.keys("reader", 0, keys_of("shared", 2))
    assert driver.lookup("reader", 0, 40).num_external_tokens == 32
    driver.arrive("stranger", 40)
    driver.keys("stranger", 0, keys_of("other", 2))
    assert driver.lookup("stranger", 0, 40).num_external_tokens == 0
    driver.step()
    outcome = rerun(record(driver.configuration, list(enumerate(driver.observed, 1))))
    answers = [event for _, event in outcome.events if isinstance(event, e.LookupAnswered)]
    assert [(event.request_id, event.num_external_tokens) for event in answers][-2:] == [
        ("reader", 32),
        ("stranger", 0),
    ]
    assert outcome.other_answers == []
    assert outcome.troubles == []


def test_a_request_that_was_never_announced_is_asked_about_all_the_same() -> None:
    """The rule that broke then breaks again: the connector never knew of it."""
    driver = Driver()
    driver.observe(e.LookupRequested("stray", 0, 40, 0))
    driver.step()
    outcome = rerun(record(driver.configuration, list(enumerate(driver.observed, 1))))
    assert "LEGAL_TRANSITION was broken for stray in get_num_new_matched_tokens" in outcome.trouble("LEGAL_TRANSITION")


def test_handlers_of_ones_own_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named as in the connector's configuration; one that raises breaks HANDLER_RAISED, in the hook that met it."""
    import sys
    import types

    from kvledger.lifecycle.handlers import New

    def raising(*_arguments: object) -> object:
        message = "broken on purpose"
        raise RuntimeError(message)

    module = types.ModuleType("handlers_of_ones_own")
    module.__dict__["Broken"] = type("Broken", (New,), {"lookup_requested": raising})
    monkeypatch.setitem(sys.modules, "handlers_of_ones_own", module)
    driver = Driver()
    driver.arrive("r", 40)
    driver.lookup("r", 0, 40)
    driver.step()
    recording = record(driver.configuration, list(enumerate(driver.observed, 1)))
    assert rerun(recording).troubles == []
    trouble = rerun(recording, handlers=("handlers_of_ones_own:Broken",)).trouble("HANDLER_RAISED")
    assert "HANDLER_RAISED was broken for r in get_num_new_matched_tokens" in trouble
