"""LMCache 0.5.6 in its multi-process mode, unmodified, recorded in real vLLM; `make lmcache` runs this."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.engines import Reference
from e2e.lmcache import Server, connector, running_server, uncompiled
from kvledger.adapters.lab.demo.engine import generate, settle, start
from kvledger.adapters.lab.demo.workload import Workload
from kvledger.adapters.recorded.extension import Recorder
from kvledger.adapters.recorded.payloads import Transferred
from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.tools.logs.log import open_log
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit

pytestmark = pytest.mark.vllm

WORKLOAD = Workload(seed=1)


@pytest.fixture
def server(lmcache: Any, tmp_path: Path) -> Iterator[Server]:  # noqa: ARG001 -- it must be installed
    """As small as the workload."""
    with running_server(WORKLOAD.chunk_size, 0.2, tmp_path / "server.txt") as running:
        yield running


@contextmanager
def recorded(
    model: Path, port: int, log_dir: Path, monkeypatch: pytest.MonkeyPatch, policy: str = "recompute", **options: Any
) -> Iterator[Any]:
    """An engine with LMCache in a recorder."""
    from vllm.distributed import cleanup_dist_env_and_memory

    monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")
    monkeypatch.setitem(sys.modules, "numba", uncompiled())
    recorder = {
        "kv_connector": "KVLedgerRecorderHMA",
        "kv_connector_module_path": "kvledger.adapters.recorder",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"log_dir": str(log_dir), "connector": connector(port, **options)},
    }
    llm = start(str(model), WORKLOAD, recorder)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def connector_of(llm: Any) -> Any:
    """The recorder, on the scheduler's side."""
    return llm.llm_engine.engine_core.engine_core.scheduler.connector


def audited(log_path: Path) -> tuple[list[e.Event], Audit]:
    """Events, and what the rules say of them."""
    log = open_log(log_path)
    events = list(log.trusted_events())
    audit = Audit(log.core, log.configuration)
    audit.run(events)
    return [event for _, event in events], audit


def test_lmcache_recovers_preempted_requests_and_its_log_is_sound(
    model: Path, reference: Reference, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs are those of an engine that never preempts; what is saved and loaded is in the log and breaks no rule."""
    expected = reference(WORKLOAD.prompts(), WORKLOAD.max_tokens)
    with recorded(model, server.port, tmp_path / "recorded", monkeypatch) as llm:
        log_path = connector_of(llm).recording.log.log.directory
        assert generate(llm, WORKLOAD.prompts(), WORKLOAD.max_tokens) == expected
        settle(llm)
    events, audit = audited(log_path)
    assert audit.violations == []
    assert audit.is_sound
    assert main(["verify", str(log_path)]) == 0
    preempted = {event.request_id for event in events if isinstance(event, e.RequestPreempted)}
    told = [(event, Recorder.payload_of(event)) for event in events if isinstance(event, e.ExtensionObserved)]
    copies = [(event.request_id, copy.is_load) for event, copy in told if isinstance(copy, Transferred)]
    assert preempted
    assert preempted <= {request_id for request_id, is_load in copies if is_load}
    assert any(not is_load for _, is_load in copies)


def kill_before_the_first_load(server: Server, connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the connector has offered nothing is there any more."""
    take_up = connector.wrapped.update_state_after_alloc

    def taken_up(request: Any, blocks: Any, num_external_tokens: int) -> None:
        take_up(request, blocks, num_external_tokens)
        if num_external_tokens:
            server.process.kill()
            server.process.wait()

    monkeypatch.setattr(connector.wrapped, "update_state_after_alloc", taken_up)


IMPATIENT = {"lmcache.mp.mq_timeout": 3.0, "lmcache.mp.heartbeat_interval": 1.0}
"""Seconds. A worker stands in `start_load_kv`, and `shutdown`, for the first of them: 300 by default."""


def test_a_server_that_dies_before_a_load_costs_no_answer(
    model: Path, reference: Reference, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "recompute": the blocks are reported as not loaded, and everybody is answered as without LMCache."""
    expected = reference(WORKLOAD.prompts(), WORKLOAD.max_tokens)
    with recorded(model, server.port, tmp_path / "recorded", monkeypatch, **IMPATIENT) as llm:
        log_path = connector_of(llm).recording.log.log.directory
        kill_before_the_first_load(server, connector_of(llm), monkeypatch)
        assert generate(llm, WORKLOAD.prompts(), WORKLOAD.max_tokens) == expected
        settle(llm)
    events, audit = audited(log_path)
    assert audit.is_sound
    assert [type(event) for event in events if isinstance(event, e.LoadCompleted | e.LoadFailed)] == [e.LoadFailed]


def test_a_server_that_dies_before_a_load_ends_an_engine_that_is_to_fail_requests(
    model: Path, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "fail", as with vLLM's own LMCache connector (docs/findings.md): the log says who is named twice."""
    with recorded(model, server.port, tmp_path / "recorded", monkeypatch, "fail", **IMPATIENT) as llm:
        log_path = connector_of(llm).recording.log.log.directory
        kill_before_the_first_load(server, connector_of(llm), monkeypatch)
        with pytest.raises(AssertionError):
            generate(llm, WORKLOAD.prompts(), WORKLOAD.max_tokens)
    _, audit = audited(log_path)
    assert [violation.rule for violation in audit.violations] == ["COMPLETION_ONCE"]
