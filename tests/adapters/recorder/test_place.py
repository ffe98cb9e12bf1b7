"""The recorder knows whether another connector holds it, before it hears of any report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sim.connectors import Recorded, Several
from sim.recorded import audited, events_of, recordings, said_in

from kvledger.adapters.lab.simulation.connectors import ConnectorSetup, Offloading, SimpleCPU
from kvledger.adapters.recorded import payloads
from kvledger.adapters.recorded.extension import Recorder
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

Record = Callable[..., tuple[Any, Any]]

RECORDED = Recorded(inner=Offloading())
BUNDLE = {"kv_transfer": {"kv_connector_module_path": "sim.bundle"}}


def is_held(recording: Any) -> bool:
    """Whether its log says so, and that before the first report."""
    events = [event for _, event in events_of(recording)]
    reports = [
        place
        for place, event in enumerate(events)
        if isinstance(event, e.ExtensionNoted) and isinstance(Recorder.payload_of(event), payloads.WorkersReported)
    ]
    notes = [
        place
        for place, event in enumerate(events)
        if isinstance(event, e.LogNote) and event.text.startswith(payloads.CHILD)
    ]
    assert reports
    assert len(notes) < 2
    assert not notes or notes[0] < reports[0]
    return bool(notes)


@pytest.mark.parametrize(
    ("setup", "options", "held"),
    [
        (RECORDED, {}, [False]),
        (RECORDED, {"digests": "all"}, [False]),
        (Several(children=(RECORDED, SimpleCPU())), {}, [True]),
        (Several(children=(RECORDED, SimpleCPU())), {"digests": "all"}, [True]),
        (Several(children=(RECORDED,)), {}, [True]),
        (Several(children=(RECORDED, SimpleCPU()), name="Bundle"), BUNDLE, [True]),
        (Recorded(inner=Several(children=(RECORDED, SimpleCPU()))), {}, [False, True]),
        (Recorded(inner=Several(children=(RECORDED, SimpleCPU()))), {"digests": "all"}, [False, True]),
        (Recorded(inner=RECORDED), {}, [False, False]),
        (Recorded(inner=RECORDED), {"digests": "all"}, [False, False]),
    ],
)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_recorder_says_whether_another_connector_holds_it(
    record: Record, setup: ConnectorSetup, options: dict[str, Any], held: list[bool], *, async_scheduling: bool
) -> None:
    """The outermost first. No log breaks a rule."""
    engine, _ = record(setup=setup, async_scheduling=async_scheduling, **options)
    for number in range(3):
        engine.add(f"request {number}", range(number % 2, 70), 3)
        engine.run()
        engine.scheduler.reset_prefix_cache()
    found = list(recordings(engine.scheduler.connector))
    assert [is_held(each) for each in found] == held
    for each in found:
        assert [violation.rule for violation in audited(each).violations] == []
        assert is_held(each) or not [ends for ends in said_in(each, payloads.ReportedBy) if ends.child == payloads.OWN]
