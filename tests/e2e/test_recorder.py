"""The recorder around real connectors in real vLLM: nothing changes for them, and the log says what they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.engines import Reference, read_sound_log, settle
from kvledger.adapters.cli.main import main
from kvledger.adapters.demo.engine import generate, start
from kvledger.adapters.demo.workload import Workload, connector
from kvledger.adapters.reading.logs import open_log
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit

pytestmark = pytest.mark.vllm

WORKLOAD = Workload(seed=1, chunk_size=32)


def recorded(inner: dict[str, Any], log_dir: Path) -> dict[str, Any]:
    """The configuration of an engine whose connector is recorded in `log_dir`."""
    return {
        "kv_connector": "KVLedgerRecorder",
        "kv_connector_module_path": "kvledger.adapters.recorder",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"log_dir": str(log_dir), "connector": inner},
    }


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
    log = open_log(next((tmp_path / "recorded").iterdir()))
    events = list(log.trusted_events())
    audit = Audit(log.core, log.configuration)
    audit.run(events)
    assert audit.is_sound
    seen = audit.projections.totals.figures
    assert (seen.num_requests, seen.num_preemptions) == (figures.num_requests, figures.num_preemptions)
    loads = [event for _, event in events if isinstance(event, e.LoadIssued)]
    assert sum(load.num_tokens for load in loads) == figures.num_tokens_loaded
    assert main(["verify", str(log.path)]) == 0
