"""Under `MultiConnector` the recorder names the connector that reports an end which it does not owe.

vllm#51786, #53049, #42831, #52954: a child reported the end of a load or of kept blocks that was not its own. The
recorder around that very child found its log sound.
"""

from __future__ import annotations

from typing import Any

import pytest
from sim.connectors import NamedConnector, Recorded, Several
from sim.recorded import audited, recordings, said_in
from sim.slow_copies import SlowCopies

from kvledger.adapters.lab.simulation.connectors import KVLEDGER, ConnectorSetup, Offloading, SimpleCPU
from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.recorded import payloads

pytestmark = pytest.mark.scheduler


def meddler(field: str, num_steps: int, after: str = "update_state_after_alloc") -> NamedConnector:
    """A child that reports ends of "victim"."""
    options = {"field": field, "num_steps": num_steps, "after": after}
    return NamedConnector(name="Meddler", module="sim.meddler", options=options)


def engine_with(setup: ConnectorSetup) -> SimulatedEngine:
    """An engine whose first child is kvledger, with copies that take some steps."""
    engine = SimulatedEngine(
        setup=setup,
        num_blocks=40,
        host_bytes=1 << 20,
        chunk_size=16,
        load_mode="async",
        save_mode="async",
        kv_transfer={"kv_load_failure_policy": "recompute"},
    )
    (worker,) = engine.workers
    child: Any = getattr(worker, "wrapped", worker)._connectors[0]
    side = getattr(child, "wrapped", child)._worker_side
    side._async_engine = SlowCopies(side._async_engine, num_questions=6)
    return engine


def found_in(engine: SimulatedEngine) -> dict[str, set[str]]:
    """Rule -> what each recorder's log says, after a prompt was saved, forgotten by the device and loaded."""
    engine.add("warm", range(100), 2)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    engine.add("victim", range(100), 8)
    engine.run(300)
    found: dict[str, set[str]] = {}
    for recording in recordings(engine.scheduler.connector):
        for violation in audited(recording).violations:
            found.setdefault(violation.rule, set()).add(violation.detail)
    engine.shutdown()
    return found


@pytest.mark.parametrize("num_steps", [1, 12])
@pytest.mark.parametrize("field", ["finished_recving", "failed_recving", "finished_sending"])
def test_the_recorder_around_a_child_names_an_end_that_the_child_does_not_owe(field: str, num_steps: int) -> None:
    """Its own workers' reports reach it apart from those of its siblings."""
    what = "the release of kept blocks" if field == "finished_sending" else "the end of an asynchronous load"
    engine = engine_with(Several(children=(KVLEDGER, Recorded(inner=meddler(field, num_steps)))))
    assert found_in(engine) == {"COMPLETION_ONCE": {f"Meddler reports {what} of 'victim', but has no such end pending"}}


@pytest.mark.parametrize("field", ["finished_recving", "failed_recving"])
def test_the_recorder_around_the_parent_names_the_child_that_reports_another_one_s_load(field: str) -> None:
    """Kvledger was chosen, and the recorder around `MultiConnector` sees which child said that the load had ended."""
    engine = engine_with(Recorded(inner=Several(children=(KVLEDGER, meddler(field, 1)))))
    details = found_in(engine)["COMPLETION_ONCE"]
    assert "Meddler reports the end of an asynchronous load of 'victim', but KVLedgerConnector loads for it" in details


@pytest.mark.parametrize("inner", [False, True])
def test_a_phantom_end_of_kept_blocks_is_named_and_the_engine_lives(*, inner: bool) -> None:
    """vllm#52954: vLLM asserts on an end of a request that it has forgotten; kvledger removes it."""
    phantom: ConnectorSetup = meddler("finished_sending", 1, after="request_finished")
    setup = Several(children=(KVLEDGER, Recorded(inner=phantom) if inner else phantom))
    engine = SimulatedEngine(
        setup=setup if inner else Recorded(inner=setup),
        num_blocks=40,
        host_bytes=1 << 20,
        chunk_size=16,
        save_mode="sync",
    )
    engine.add("victim", range(100), 2)
    engine.run(100)
    details = [v.detail for each in recordings(engine.scheduler.connector) for v in audited(each).violations]
    engine.shutdown()
    assert details
    assert all("'victim'" in detail and "Meddler" in detail for detail in details)


@pytest.mark.parametrize("recorded", ["child", "parent", "both"])
def test_ends_that_are_owed_are_sound(recorded: str) -> None:
    """Kvledger and a neighbour that loads: each reports its own, and no recorder objects."""
    neighbour: ConnectorSetup = NamedConnector(
        name="Neighbour",
        module="sim.neighbour",
        options={"num_tokens": 48, "num_steps": 3, "failure_share": 0.5, "seed": 1},
    )
    if recorded in {"child", "both"}:
        neighbour = Recorded(inner=neighbour)
    ours = Recorded(inner=KVLEDGER) if recorded == "both" else KVLEDGER
    setup: ConnectorSetup = Several(children=(ours, neighbour))
    engine = engine_with(setup if recorded == "child" else Recorded(inner=setup))
    for number in range(6):
        engine.add(f"theirs {number}", range(number, number + 64), 4)
    engine.run(300)
    assert found_in(engine) == {}
    assert any(said_in(each, payloads.ReportedBy) for each in recordings(engine.scheduler.connector))


def phantom(num_steps: int = 1, **options: Any) -> NamedConnector:
    """Reports the end of kept blocks of "victim" once it has ended."""
    given = {"field": "finished_sending", "num_steps": num_steps, "after": "request_finished", **options}
    return NamedConnector(name="Meddler", module="sim.meddler", options=given)


def details_of(setup: ConnectorSetup) -> tuple[list[str], str]:
    """What COMPLETION_ONCE says in all recorders' logs of a request that ends, and what ended the engine."""
    engine = SimulatedEngine(setup=setup, num_blocks=40, host_bytes=1 << 20, chunk_size=16)
    engine.add("victim", range(100), 2)
    error = ""
    try:
        engine.run(100)
        for _ in range(4):
            engine.step()
    except Exception as raised:  # noqa: BLE001 -- whatever ends the engine
        error = type(raised).__name__
    found = [each for log in recordings(engine.scheduler.connector) for each in audited(log).violations]
    engine.shutdown()
    assert {each.rule for each in found} <= {"COMPLETION_ONCE"}
    return [each.detail for each in found], error


@pytest.mark.parametrize("recorded", ["child", "parent"])
@pytest.mark.parametrize("sibling", [Offloading(), SimpleCPU()], ids=lambda each: each.name)
def test_a_phantom_end_that_ends_the_engine_is_named(sibling: ConnectorSetup, recorded: str) -> None:
    """vllm#52954, next to connectors that do not keep it from vLLM: the assertion comes after the log has it."""
    children = (sibling, Recorded(inner=phantom()) if recorded == "child" else phantom())
    setup: ConnectorSetup = Several(children=children)
    details, error = details_of(setup if recorded == "child" else Recorded(inner=setup))
    assert error == "AssertionError"
    assert details
    assert "Meddler reports the release of kept blocks of 'victim'" in details[0]


@pytest.mark.parametrize("recorded", ["child", "parent"])
def test_an_end_of_blocks_that_only_a_sibling_keeps_is_named(recorded: str) -> None:
    """The end is one that vLLM waits for, so the engine lives; the sibling still reads the blocks."""
    keeper, other = phantom(num_steps=0, keeps=True), phantom()
    children = (keeper, Recorded(inner=other) if recorded == "child" else other)
    setup: ConnectorSetup = Several(children=children)
    details, _ = details_of(setup if recorded == "child" else Recorded(inner=setup))
    what = "but has no such end pending" if recorded == "child" else "but only other children keep these blocks"
    assert f"Meddler reports the release of kept blocks of 'victim', {what}" in details


@pytest.mark.parametrize("recorded", ["child", "parent"])
def test_a_child_that_reports_an_end_twice_while_a_sibling_keeps_the_blocks_is_named(recorded: str) -> None:
    """Both keep them. `MultiConnector` counts two ends and lets vLLM free what the sibling still reads."""
    keeper, twice = phantom(num_steps=0, keeps=True), phantom(num_steps=2, keeps=True)
    children = (keeper, Recorded(inner=twice) if recorded == "child" else twice)
    setup: ConnectorSetup = Several(children=children)
    details, _ = details_of(setup if recorded == "child" else Recorded(inner=setup))
    assert details == ["Meddler reports the release of kept blocks of 'victim', a second time"]


@pytest.mark.parametrize("recorded", ["child", "parent"])
def test_two_children_that_keep_a_request_and_report_it_once_each_are_sound(recorded: str) -> None:
    """One of them a step later than the other, and a third child that keeps nothing."""
    first, second = phantom(keeps=True), phantom(keeps=True)
    children = (first, Recorded(inner=second) if recorded == "child" else second, phantom(num_steps=0))
    setup: ConnectorSetup = Several(children=children)
    assert details_of(setup if recorded == "child" else Recorded(inner=setup)) == ([], "")
