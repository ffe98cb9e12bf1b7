"""What a recorder writes of requests whose ids are too long for a log. Each connector gets and reports the whole id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sim.connectors import Recorded, Several
from sim.crowd import serve_crowd
from sim.recorded import CORE, audited, events_of, recordings
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvledger.adapters.lab.simulation.connectors import KVLEDGER, ConnectorSetup, Offloading, SimpleCPU
from kvledger.adapters.recorded.extension import Recorder
from kvledger.adapters.recorded.payloads import ReportedToVLLM
from kvledger.adapters.recorder.page_digests import AskedPages, CopiedPages, RecordedPages
from kvledger.adapters.tools.logs.log import open_log
from kvledger.lifecycle import cut_request_id, logged_request_id
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

LONG = "x" * 1_000_000
_LIFE = (e.RequestArrived, e.BlocksAllocated, e.RequestPreempted, e.RequestFinished)
ASYNC = {"load_mode": "async", "save_mode": "async"}
CASES: dict[str, tuple[ConnectorSetup, dict[str, Any]]] = {
    "OffloadingConnector": (Recorded(inner=Offloading()), {}),
    "with digests": (Recorded(inner=Offloading()), {"digests": "all"}),
    "SimpleCPUOffloadConnector": (Recorded(inner=SimpleCPU()), {"enable_prefix_caching": True}),
    "kvledger": (Recorded(inner=KVLEDGER), ASYNC),
    "children": (Recorded(inner=Several(children=(KVLEDGER, Offloading()))), ASYNC),
}


def is_cut(event: e.Event) -> bool:
    """Whether the event, payloads of the recorder included, has no long run of the id in it."""
    return "x" * 300 not in repr(event)


def serve(record: Callable[..., Any], named: Callable[[str], str], case: str, **more: Any) -> tuple[Any, Any]:
    """Three requests that preempt each other, an abort, and readers of what was saved."""
    setup, options = CASES[case]
    engine, recording = record(setup=setup, **{"num_blocks": 13, "enable_prefix_caching": False, **options, **more})
    serve_crowd(engine, named)
    for number in range(3):
        engine.add(named(f"again {number}"), range(100 * number, 100 * number + 40), 5)
        engine.run()
    return engine, recording


@pytest.mark.parametrize("case", CASES)
def test_long_ids_are_recorded_cut_and_nothing_else_changes(record: Callable[..., Any], case: str) -> None:
    """The same lives as with short ids, no long id in any event, and a sound log."""
    kinds = []
    for named in (str, lambda name: f"{LONG}{name}"):
        engine, _ = serve(record, named, case)
        for recording in recordings(engine.scheduler.connector):
            events = events_of(recording)
            notes = [event.text for _, event in events if isinstance(event, e.LogNote)]
            assert not any("recording stopped" in note for note in notes), notes
            assert audited(recording, events).is_sound
            assert len(recording._ids) == 0
            assert all(is_cut(event) for _, event in events)
            # How many steps an asynchronous copy takes is not fixed.
            kinds.append(Counter(type(event) for _, event in events if isinstance(event, _LIFE)))
    num_recorders = len(kinds) // 2
    assert kinds[:num_recorders] == kinds[num_recorders:]


def test_workers_write_ids_cut_as_well(record: Callable[..., Any], tmp_path: Path) -> None:
    """Each has a log of its own."""
    engine, _ = serve(record, lambda name: f"{LONG}{name}", "kvledger", log_dir=str(tmp_path))
    engine.shutdown()
    for path in tmp_path.iterdir():
        assert all(is_cut(event) for _, event in open_log(path, CORE).events())


def test_reports_name_requests_as_the_other_events_do(record: Callable[..., Any]) -> None:
    """Else the rules could not compare who waits with whose end is reported."""
    _, recording = serve(record, lambda name: f"{LONG}{name}", "kvledger")
    reported = [Recorder.payload_of(event) for _, event in events_of(recording) if isinstance(event, e.ExtensionNoted)]
    ends = {
        request_id
        for payload in reported
        if type(payload) is ReportedToVLLM
        for request_id in (*payload.finished_sending, *payload.finished_recving)
    }
    assert ends
    assert ends <= {event.request_id for _, event in events_of(recording) if isinstance(event, e.RequestArrived)}


def test_a_load_of_a_forged_id_is_digested_when_its_own_end_comes() -> None:
    """A request had the cut id of another one, and the worker took the end of the other's load for its end."""
    cut = logged_request_id(LONG)
    pages = RecordedPages(0, num_blocks=2)
    pages.register({"layer": torch.zeros(2, 4)})
    loads = [(cut, cut), (cut_request_id(cut + LONG), LONG)]
    copies = [
        CopiedPages((logged, number, 0), vllm_id, "load", is_load=True, ends_with="request", group=0, first_block=0,
                    block_ids=(number,))
        for number, (logged, vllm_id) in enumerate(loads)
    ]  # fmt: skip
    pages.step_begins(AskedPages(KVConnectorMetadata(), tuple(copies)))
    pages.received([LONG], [])
    assert [found.pages.vllm_id for found in pages.taken()] == [LONG]
    pages.received([cut], [])
    assert [found.pages.vllm_id for found in pages.taken()] == [cut]
