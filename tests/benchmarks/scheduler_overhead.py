"""What a connector adds to the real scheduler: `schedule()` and `update_from_output()` while many requests decode.

Every contender drives vLLM's own `Scheduler` with the same requests in the same process; their steps are taken in
turns, so that whatever else the machine does hits all of them. The clock is the thread's own CPU time, so that other
processes cost nobody anything. Workers are not run: each contender is told that its
copies are done one step later, in its own terms. What counts is the ratio of medians within one run.

With churn, some requests arrive and as many end in each step; `schedule()` then includes that they are taken up.

A recorded connector is compared with the same one alone.

Measures: the scheduler's side of the hooks, with the event log written to disk at durability `os`.
Does not measure: copies, the model, the worker's side of the hooks.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata
from vllm.v1.structured_output import StructuredOutputManager

from kvledger.adapters.simulation.connectors import KVLEDGER_TRANSFER
from kvledger.adapters.simulation.engine import kv_cache_config, vllm_config
from kvledger.adapters.simulation.hashed_model import block_bytes
from kvledger.adapters.vllm.event_log import OpenedLog
from kvledger.adapters.vllm.metadata import JobReport, StepJobs, WorkerReports

BLOCK_SIZE = 16
PROMPT_TOKENS = 200
STEPS_PER_TURN = 20
"""Turns are short against the machine's moods and long against the first steps' cold caches."""


@attrs.frozen
class Timing:
    """Medians in microseconds, and what a step added to the event log on the average; 0 where there is none."""

    name: str
    schedule_us: float
    update_us: float
    log_bytes: float
    turns_us: tuple[float, ...]
    """The median of `schedule()` and `update_from_output()` together in each turn."""

    def added_to(self, base: Timing) -> Added:
        """How much longer it took than another contender in the same turns."""
        ratios = sorted(mine / its - 1 for mine, its in zip(self.turns_us, base.turns_us, strict=True))
        low, middle, high = (ratios[round(share * (len(ratios) - 1))] for share in (0.1, 0.5, 0.9))
        return Added(low, middle, high)


@attrs.frozen
class Added:
    """A part of the other's time, over the turns: the tenth percentile, the median and the ninetieth."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        """`+12 % (+9 to +16)`."""
        return f"{self.middle:+.0%} ({self.low * 100:+.0f} to {self.high * 100:+.0f})"


def report_all_done(metadata: KVConnectorMetadata | None) -> KVConnectorWorkerMetadata | None:
    """What the workers of each connector would send back after finishing everything at once."""
    if isinstance(metadata, StepJobs):
        jobs = (*metadata.saves_before_forward, *metadata.loads, *metadata.saves)
        reports = tuple(JobReport(job.job_id, 0, done=True, num_bytes=1, duration_ns=1) for job in jobs)
        return WorkerReports(reports) if reports else None
    if isinstance(metadata, OffloadingConnectorMetadata):
        return OffloadingWorkerMetadata(dict.fromkeys((*metadata.load_jobs, *metadata.store_jobs), 1))
    if isinstance(metadata, SimpleCPUOffloadMetadata) and metadata.store_event >= 0:
        return SimpleCPUOffloadWorkerMetadata({metadata.store_event: 1})
    return None


class Contender:
    """One scheduler with one connector, stepped by hand."""

    def __init__(
        self, name: str, kv_transfer: dict[str, Any] | None, num_requests: int, num_steps: int, num_arrivals: int
    ) -> None:
        self.name = name
        self._num_arrivals, self._num_arrived = 0, 0
        self._queue: list[Request] = []
        self._num_outputs = num_requests // num_arrivals if num_arrivals else 4096
        num_outputs = min(num_steps, self._num_outputs)
        num_blocks = num_requests * ((PROMPT_TOKENS + num_outputs) // BLOCK_SIZE + 4)
        config = vllm_config(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=num_requests,
            max_num_batched_tokens=8192,
            max_model_len=4096,
            enable_prefix_caching=True,
            async_scheduling=False,
            kv_transfer=kv_transfer,
        )
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache_config(num_blocks, BLOCK_SIZE),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )
        self._hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)
        for number in range(num_requests):
            # With churn, their ends lie as far apart as those of the requests that arrive later.
            self._arrive(1 + number // num_arrivals if num_arrivals else self._num_outputs)
        self.schedule_ns: list[int] = []
        self.update_ns: list[int] = []
        self.turns_us: list[float] = []
        self.step()
        while any(request.num_output_tokens == 0 for request in self.scheduler.requests.values()):
            self.step()
        self._num_arrivals = num_arrivals
        self.schedule_ns.clear()
        self.update_ns.clear()
        self._log_bytes_before = self._log_bytes()

    def _arrive(self, num_outputs: int) -> None:
        number, self._num_arrived = self._num_arrived, self._num_arrived + 1
        # Prompts of different lengths, so that blocks fill in different steps, as they do in a server.
        length = PROMPT_TOKENS - number % BLOCK_SIZE
        request = Request(
            request_id=f"cmpl-benchmark-{number:06d}-0",
            prompt_token_ids=[number % 512, number // 512 % 512, *[(number + k) % 512 for k in range(length - 2)]],
            sampling_params=SamplingParams(max_tokens=num_outputs, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self._queue.append(request)

    def step(self) -> None:
        """One engine step; only the scheduler's calls are timed."""
        for _ in range(self._num_arrivals):
            self._arrive(self._num_outputs)
        arrived, self._queue = self._queue, []
        started = time.thread_time_ns()
        for request in arrived:
            self.scheduler.add_request(request)
        scheduler_output = self.scheduler.schedule()
        self.schedule_ns.append(time.thread_time_ns() - started)
        output = self._output(scheduler_output)
        started = time.thread_time_ns()
        self.scheduler.update_from_output(scheduler_output, output)
        self.update_ns.append(time.thread_time_ns() - started)

    def _output(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        request_ids = list(scheduler_output.num_scheduled_tokens)
        sampled = []
        for request_id in request_ids:
            request = self.scheduler.requests[request_id]
            sampled.append([7] if request.num_computed_tokens >= request.num_tokens else [])
        connector_output = None
        if self.scheduler.connector is not None:
            worker_meta = report_all_done(scheduler_output.kv_connector_metadata)
            connector_output = KVConnectorOutput(kv_connector_worker_meta=worker_meta)
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
            kv_connector_output=connector_output,
        )

    def take_turn(self) -> None:
        """Some steps, while the others wait."""
        for _ in range(STEPS_PER_TURN):
            self.step()
        steps = zip(self.schedule_ns[-STEPS_PER_TURN:], self.update_ns[-STEPS_PER_TURN:], strict=True)
        self.turns_us.append(statistics.median(map(sum, steps)) / 1000)

    def timing(self) -> Timing:
        """The medians so far."""
        return Timing(
            self.name,
            statistics.median(self.schedule_ns) / 1000,
            statistics.median(self.update_ns) / 1000,
            (self._log_bytes() - self._log_bytes_before) / len(self.schedule_ns),
            tuple(self.turns_us),
        )

    def _log_bytes(self) -> int:
        side: Any = self.scheduler.connector
        while (log := _log_of(side)) is None and side is not None:
            side = vars(side).get("wrapped")
        return 0 if log is None else sum(path.stat().st_size for path in log.directory.iterdir())


def _log_of(connector: Any) -> OpenedLog | None:
    """Of kvledger's connector, or of a recorder."""
    if connector is None:
        return None
    own = vars(connector)
    if own.get("recording") is not None:
        return own["recording"].log.log
    return getattr(own.get("_scheduler_side"), "log", None)


Field = Mapping[str, dict[str, Any] | None]
"""Name -> `kv_transfer_config`."""
HOST_BYTES = block_bytes(BLOCK_SIZE) * 100_000
PEERS: Field = MappingProxyType(
    {
        "OffloadingConnector": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": HOST_BYTES, "offload_prompt_only": False},
        },
        "SimpleCPUOffloadConnector": {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": HOST_BYTES},
        },
    }
)
"""With their defaults and room for everything."""
IDLE = {"kv_connector": "Witness", "kv_connector_module_path": "sim.witness", "kv_role": "kv_both"}
RECORDED = "recorded "


def contenders(log_dir: Path) -> Field:
    """kvledger, its peers, and nobody."""
    ledger = {**KVLEDGER_TRANSFER, "kv_role": "kv_both"}

    def ours(**extra: object) -> dict[str, Any]:
        return {**ledger, "kv_connector_extra_config": {"host_bytes": HOST_BYTES, "log_dir": str(log_dir), **extra}}

    return {
        "no connector": None,
        "KVLedgerConnector": ours(),
        "KVLedgerConnector, chunk 16": ours(chunk_size=16),
        **PEERS,
    }


def recorded_contenders(log_dir: Path) -> Field:
    """The peers and a connector that does nothing, each alone and recorded."""
    alone = {"a connector that does nothing": IDLE, **PEERS}
    field: dict[str, dict[str, Any] | None] = {}
    for name, transfer in alone.items():
        field[name] = transfer
        field[f"{RECORDED}{name}"] = {
            "kv_connector": "KVLedgerRecorderHMA",
            "kv_connector_module_path": "kvledger.adapters.recorder",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"log_dir": str(log_dir), "connector": transfer},
        }
    return field


def measure(
    *,
    num_requests: int = 256,
    num_steps: int = 1000,
    num_arrivals: int = 0,
    make_field: Callable[[Path], Field] = contenders,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> list[Timing]:
    """Step all contenders in turns and return their medians; `num_arrivals` requests arrive, and end, in each step."""
    with tempfile.TemporaryDirectory() as folder:
        field = [
            Contender(name, transfer, num_requests, num_steps, num_arrivals)
            for name, transfer in make_field(Path(folder)).items()
        ]
        gc.collect()
        gc.freeze()  # as EngineCore does, so that nobody pays for another's heap
        for turn in range(num_steps // STEPS_PER_TURN):
            for offset in range(len(field)):
                field[(turn + offset) % len(field)].take_turn()
            progress((turn + 1) * STEPS_PER_TURN, num_steps)
        timings = [contender.timing() for contender in field]
        for contender in field:
            contender.scheduler.shutdown()
        return timings
