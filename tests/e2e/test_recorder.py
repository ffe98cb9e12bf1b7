"""The recorder around real connectors in real vLLM: nothing changes for them, and the log says what they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lifecycle_driver.concerned import figures_of

from e2e.engines import Reference, read_sound_log
from kvledger.adapters.lab.demo.engine import generate, settle, start
from kvledger.adapters.lab.demo.workload import Workload, connector
from kvledger.adapters.tools.cli.main import main
from kvledger.adapters.tools.exit_codes import ExitCode
from kvledger.adapters.tools.logs.log import open_log
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit

pytestmark = pytest.mark.vllm

WORKLOAD = Workload(seed=1, chunk_size=32)


def recorded(inner: dict[str, Any], log_dir: Path) -> dict[str, Any]:
    """The configuration of an engine whose connector is recorded in `log_dir`."""
    return {
        "kv_connector": "KVLedgerRecorder",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"log_dir": str(log_dir), "connector": inner},
    }


def logs_in(log_dir: Path) -> dict[int | None, Path]:
    """Rank -> the log of its worker; None: the scheduler's."""
    return {open_log(path).worker_rank: path for path in log_dir.iterdir()}


def test_an_engine_that_a_worker_ends_ends_as_it_would_and_the_log_says_where(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ExampleConnector loads what it never saved when a preempted request resumes (vLLM 0.32)."""
    from vllm.distributed import cleanup_dist_env_and_memory

    raised = []
    for storage in (tmp_path / "alone", tmp_path / "inside"):  # of its own: it finds what an engine before stored there
        inner = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(storage)},
        }
        transfer = inner if storage.name == "alone" else recorded(inner, tmp_path / "recorded")
        llm = start(str(model), WORKLOAD, transfer)
        try:
            with pytest.raises(FileNotFoundError) as caught:
                generate(llm, WORKLOAD.prompts(), WORKLOAD.max_tokens)
            raised.append(str(caught.value).partition(f"{storage}/")[2])
        finally:
            llm.llm_engine.engine_core.shutdown()
            cleanup_dist_env_and_memory()
    assert raised[0] == raised[1] != ""
    logs = logs_in(tmp_path / "recorded")
    assert main(["verify", str(logs[None])]) == ExitCode.RULE_BROKEN
    printed = capsys.readouterr().out
    assert "LOAD_DST_EXCLUSIVE" in printed  # the scheduler's side asked for a block more than it had offered
    assert "worker 0 raised in start_load_kv of step " in printed
    assert "FileNotFoundError" in printed


def test_a_recorded_connector_recovers_what_it_would_have_recovered(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    """Outputs are those of an engine that never preempts; the recorder's log is sound, and so is kvledger's own."""
    from vllm.distributed import cleanup_dist_env_and_memory

    expected = reference(WORKLOAD.prompts(), WORKLOAD.max_tokens)
    inner = connector(tmp_path / "own", chunk_size=WORKLOAD.chunk_size, host_bytes="64MiB")
    llm = start(str(model), WORKLOAD, recorded(inner, tmp_path / "recorded"))
    try:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        assert generate(llm, WORKLOAD.prompts(), WORKLOAD.max_tokens) == expected
        settle(llm)
        own = scheduler.connector.scheduler_side.log.directory  # asked of the recorder, answered by the wrapped one
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
    figures = read_sound_log(own).figures
    assert figures.num_preemptions > 0
    log = open_log(logs_in(tmp_path / "recorded")[None])
    events = list(log.trusted_events())
    audit = Audit(log.core, log.configuration)
    audit.run(events)
    assert audit.is_sound
    seen = figures_of(events, log.configuration, log.core)
    assert (seen.num_requests, seen.num_preemptions) == (figures.num_requests, figures.num_preemptions)
    loads = [event for _, event in events if isinstance(event, e.LoadIssued)]
    assert sum(load.num_tokens for load in loads) == figures.num_tokens_loaded
    assert main(["verify", str(log.path)]) == 0
