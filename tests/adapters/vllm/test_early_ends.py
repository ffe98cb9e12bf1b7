"""Ends that another child of a `MultiConnector` reports of requests whose copies are ours.

vllm#51786, #53049, #42831: a child that was told 0 tokens loaded a request all the same and reported its end. vLLM took
the load of the chosen child for done, and read blocks that were still being filled; kvledger's log was sound.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sim.connectors import NamedConnector, Several
from sim.slow_copies import SlowCopies

from kvledger.adapters.lab.simulation.connectors import KVLEDGER
from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.lab.simulation.expected import Expected
from kvledger.adapters.tools.logs.log import open_log
from kvledger.lifecycle import Core
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit

pytestmark = pytest.mark.scheduler


def engine_with(log_dir: Path, *, ours_first: bool, num_questions: int = 6, **options: Any) -> SimulatedEngine:
    """A `MultiConnector` of kvledger and a `Meddler`; a copy of ours is done when the worker has asked so often."""
    meddler = NamedConnector(name="Meddler", module="sim.meddler", options=options)
    children = (KVLEDGER, meddler) if ours_first else (meddler, KVLEDGER)
    engine = SimulatedEngine(
        setup=Several(children=children),
        num_blocks=40,
        host_bytes=1 << 20,
        chunk_size=16,
        log_dir=str(log_dir),
        load_mode="async",
        save_mode="async",
        kv_transfer={"kv_load_failure_policy": "recompute"},
    )
    side = engine.workers[0]._connectors[0 if ours_first else 1]._worker_side
    side._async_engine = SlowCopies(side._async_engine, num_questions=num_questions)
    return engine


def serve_twice(engine: SimulatedEngine) -> None:
    """Save a prompt, let the device forget it, and let "victim" load it."""
    engine.add("warm", range(100), 2)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    engine.add("victim", range(100), 8)
    engine.add("other", range(200, 260), 8)
    engine.run(300)


def audit_of(log_dir: Path) -> tuple[Audit, list[Any]]:
    """What the rules say of kvledger's log, and its events."""
    (path,) = log_dir.iterdir()
    log = open_log(path)
    events = list(log.trusted_events())
    audit = Audit(Core.standard(), log.configuration)
    audit.run(events)
    return audit, [event for _, event in events]


@pytest.mark.parametrize("ours_first", [False, True])
@pytest.mark.parametrize("num_steps", [1, 3, 12])
@pytest.mark.parametrize("field", ["finished_recving", "failed_recving", "finished_sending", "invalid_block_ids"])
def test_an_end_that_another_child_reports_too_early_harms_nobody_and_is_named(
    tmp_path: Path, field: str, num_steps: int, *, ours_first: bool
) -> None:
    """No unfilled block is read, the engine lives, outputs are right, and COMPLETION_ONCE names who is concerned."""
    engine = engine_with(tmp_path, ours_first=ours_first, field=field, num_steps=num_steps)
    serve_twice(engine)
    for name, first in (("victim", range(100)), ("other", range(200, 260))):
        assert engine.outputs[name] == Expected(first).output(8)
    engine.shutdown()
    audit, events = audit_of(tmp_path)
    assert {violation.rule for violation in audit.violations} == {"COMPLETION_ONCE"}
    assert {violation.request_id for violation in audit.violations} == {"victim"}
    assert audit.divergences == []
    refused = [event for event in events if isinstance(event, e.EndRefused)]
    expected_field = {"failed_recving": "finished_recving"}.get(field, field)
    assert {event.field for event in refused} <= {expected_field}
    assert bool(refused) is (field != "invalid_block_ids")
    assert not [event for event in events if isinstance(event, e.InvariantViolated | e.HookFailed)]


@pytest.mark.parametrize("field", ["finished_recving", "finished_sending"])
def test_blocks_of_an_ended_request_are_kept_until_our_copy_has_ended(tmp_path: Path, field: str) -> None:
    """vllm#52954: vLLM freed blocks that a save still read, or that a load of an aborted request still filled."""
    engine = engine_with(tmp_path, ours_first=True, field=field, after="request_finished", num_steps=1)
    if field == "finished_sending":
        engine.add("victim", range(100), 2)
        engine.run(100)
    else:
        engine.add("warm", range(100), 2)
        engine.run()
        engine.scheduler.reset_prefix_cache()
        engine.add("victim", range(100), 8)
        engine.step()
        engine.abort("victim")
        engine.run(100)
    engine.add("after", range(100), 8)
    engine.run(300)
    assert engine.outputs["after"] == Expected(range(100)).output(8)
    engine.shutdown()
    audit, events = audit_of(tmp_path)
    assert {violation.rule for violation in audit.violations} == {"COMPLETION_ONCE"}
    assert {event.field for event in events if isinstance(event, e.EndRefused)} == {field}


@pytest.mark.parametrize("field", ["finished_recving", "failed_recving", "finished_sending"])
def test_an_end_of_a_request_that_vllm_has_forgotten_is_removed(tmp_path: Path, field: str) -> None:
    """vllm#53049: a child went on reporting ends of a request that had ended, and vLLM's assertion ended the engine."""
    engine = engine_with(tmp_path, ours_first=True, field=field, num_steps=12, num_questions=1)
    serve_twice(engine)
    engine.add("victim that ends soon", range(100), 1)
    for number in range(20):
        engine.add(f"later {number}", range(300, 340), 2)
        engine.run(20)
    assert engine.outputs["later 19"] == Expected(range(300, 340)).output(2)
    engine.shutdown()
    audit, events = audit_of(tmp_path)
    assert {violation.rule for violation in audit.violations} == {"COMPLETION_ONCE"}
    assert e.NO_LIFE in {event.ordinal for event in events if isinstance(event, e.EndRefused)}


@pytest.mark.parametrize("is_aborted_early", [True, False])
def test_an_end_that_another_child_does_owe_reaches_vllm(tmp_path: Path, *, is_aborted_early: bool) -> None:
    """A child may keep a request that ends, also one that never had a block; vLLM waits for its end for ever."""
    engine = engine_with(
        tmp_path, ours_first=True, field="finished_sending", after="request_finished", keeps=True, num_questions=1
    )
    engine.add("victim", range(100), 2)
    if is_aborted_early:
        engine.abort("victim")
    engine.add("other", range(200, 260), 8)
    engine.run(100)
    assert not engine.scheduler.requests
    engine.shutdown()
    audit, _ = audit_of(tmp_path)
    assert not audit.violations


def test_an_end_that_a_later_child_adds_is_named_by_the_tokens_that_are_computed(tmp_path: Path) -> None:
    """The output that a child after it has changed is not shown to kvledger; then the next step shows it."""
    engine = engine_with(tmp_path, ours_first=True, field="finished_recving", num_steps=0)
    meddler = engine.scheduler.connector._connectors[1]
    for model in engine.models:  # a real engine computes on
        model._check = lambda *_: None

    def add(output: Any) -> None:
        output.finished_recving = {*(output.finished_recving or ()), *waiting()}

    def waiting() -> set[str]:
        requests = engine.scheduler.requests.values()
        return {request.request_id for request in requests if request.status.name == "WAITING_FOR_REMOTE_KVS"}

    meddler.update_connector_output = add
    engine.add("warm", range(100), 2)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    engine.add("victim", range(100), 8)
    with pytest.raises(AssertionError):  # vLLM's own, when our end comes
        engine.run(300)
    engine.shutdown()
    audit, _ = audit_of(tmp_path)
    assert {(violation.rule, violation.request_id) for violation in audit.violations} == {
        ("LOAD_DST_EXCLUSIVE", "victim")
    }
