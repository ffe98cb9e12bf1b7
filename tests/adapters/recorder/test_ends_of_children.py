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

from kvledger.adapters.recorder import payloads
from kvledger.adapters.simulation.connectors import KVLEDGER, ConnectorSetup
from kvledger.adapters.simulation.engine import SimulatedEngine

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
    what = "blocks that are kept" if field == "finished_sending" else "an asynchronous load"
    engine = engine_with(Several(children=(KVLEDGER, Recorded(inner=meddler(field, num_steps)))))
    assert found_in(engine) == {
        "COMPLETION_ONCE": {f"Meddler reports an end of {what} of 'victim', which it does not owe"}
    }


@pytest.mark.parametrize("field", ["finished_recving", "failed_recving"])
def test_the_recorder_around_the_parent_names_the_child_that_reports_another_one_s_load(field: str) -> None:
    """Kvledger was chosen, and the recorder around `MultiConnector` sees which child said that the load had ended."""
    engine = engine_with(Recorded(inner=Several(children=(KVLEDGER, meddler(field, 1)))))
    details = found_in(engine)["COMPLETION_ONCE"]
    assert "Meddler reports an end of an asynchronous load of 'victim', which KVLedgerConnector loads" in details


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
