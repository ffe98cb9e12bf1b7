"""kvledger's connector, which also writes down when an asynchronous load ended and when vLLM was told of it.

Its log does not say: a step that schedules nobody is not written. Scheduler and worker may be different processes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine_process import COPIES, STEPS
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvledger.adapters.vllm import KVLedgerConnector
from kvledger.storage.kv.cpu import CpuCopy, CpuCopyEngine


class WatchedConnector(KVLedgerConnector):
    """Watches steps in the scheduler's process, and copies in the worker's."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._folder = Path(vllm_config.kv_transfer_config.kv_connector_extra_config["log_dir"]).parent
        self._steps_ns: list[int] = []
        if role is KVConnectorRole.WORKER:
            self._watch_loads()

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """A step begins."""
        self._steps_ns.append(time.perf_counter_ns())
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """A step is over."""
        super().update_connector_output(connector_output)
        if connector_output.finished_recving:
            self._write(STEPS, self._steps_ns, time.perf_counter_ns())
            self._steps_ns.clear()

    def _watch_loads(self) -> None:
        start_load = CpuCopyEngine.start_load

        def start_watched(engine: CpuCopyEngine, slots: Sequence[int], block_ids: Sequence[int]) -> CpuCopy:
            begun_ns = time.perf_counter_ns()
            copy = start_load(engine, slots, block_ids)
            copy.add_done_callback(lambda _: self._write(COPIES, begun_ns, time.perf_counter_ns()))
            return copy

        CpuCopyEngine.start_load = start_watched  # type: ignore[method-assign]

    def _write(self, name: str, *values: Any) -> None:
        with (self._folder / name).open("a") as written:
            written.write(json.dumps(values) + "\n")
