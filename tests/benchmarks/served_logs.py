"""Logs of a busy server: vLLM's real `Scheduler` with our connector, workers that are done one step later, no model.

Requests come and go so that a fixed number is always wanted; prompts share beginnings. What is in a log follows from
the mix alone, but for the times.
"""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs


@attrs.frozen
class Mix:
    """How a server is used. Token counts are drawn evenly from the ranges."""

    name: str
    chunk_size: int = 256
    num_requests: int = 256
    num_blocks: int = 20_000
    num_steps: int = 1000
    num_prompt_tokens: tuple[int, int] = (100, 1000)
    num_output_tokens: tuple[int, int] = (100, 1000)
    enable_prefix_caching: bool = True
    host_pages: int = 100_000
    extra_config: Mapping[str, Any] = attrs.field(factory=dict)


MIXES: Mapping[str, Mix] = MappingProxyType(
    {
        mix.name: mix
        for mix in (
            Mix("steady", num_steps=6000),
            Mix("small-chunks", chunk_size=16, num_steps=1500),
            Mix(
                "preempting",
                num_steps=3000,
                num_blocks=4000,
                chunk_size=32,
                num_prompt_tokens=(50, 200),
                num_output_tokens=(300, 1000),
                enable_prefix_caching=False,
                host_pages=12_000,
            ),
            Mix(
                "polling",
                num_steps=4000,
                num_requests=96,
                num_blocks=2000,
                chunk_size=64,
                num_prompt_tokens=(200, 2000),
                num_output_tokens=(20, 200),
                enable_prefix_caching=False,
                host_pages=20_000,
                extra_config={"load_mode": "async", "save_mode": "async"},
            ),
        )
    }
)
"""Steady decoding as configured by default; a save for each block; a device pool too small; requests that wait."""

BLOCK_SIZE = 16
NUM_DOCUMENTS = 40
"""Beginnings that prompts share."""
STEPS_BESIDE = 3


def serve(
    mix: Mix, log_dir: Path, *, seed: int = 1, progress: Callable[[int, int], None] = lambda _done, _all: None
) -> Path:
    """Serve `mix.num_steps` steps and return the log's directory, a new one inside `log_dir`."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    from kvledger.adapters.simulation.connectors import KVLEDGER_TRANSFER
    from kvledger.adapters.simulation.engine import kv_cache_config, vllm_config
    from kvledger.adapters.simulation.hashed_model import block_bytes

    config = vllm_config(
        num_blocks=mix.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=mix.num_requests,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        enable_prefix_caching=mix.enable_prefix_caching,
        async_scheduling=False,
        kv_transfer={
            **KVLEDGER_TRANSFER,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "host_bytes": block_bytes(BLOCK_SIZE) * mix.host_pages,
                "log_dir": str(log_dir),
                "chunk_size": mix.chunk_size,
                **mix.extra_config,
            },
        },
    )
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    before = set(log_dir.iterdir()) if log_dir.exists() else set()
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=kv_cache_config(mix.num_blocks, BLOCK_SIZE),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )
    clients = _Clients(mix, seed, get_request_block_hasher(BLOCK_SIZE, hash_function))
    engine = _Engine(scheduler)
    gc.collect()
    gc.freeze()
    for step in range(mix.num_steps):
        while len(scheduler.requests) < mix.num_requests * 5 // 4:
            scheduler.add_request(clients.next_request())
        engine.step()
        if step % 100 == 0:
            progress(step, mix.num_steps)
    scheduler.shutdown()
    (log,) = set(log_dir.iterdir()) - before
    return log


class _Clients:
    def __init__(self, mix: Mix, seed: int, hasher: Any) -> None:
        self._mix = mix
        self._hasher = hasher
        self._random = random.Random(seed)
        self._count = 0

    def next_request(self) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        number, self._count = self._count, self._count + 1
        draw = self._random
        num_prompt_tokens = draw.randint(*self._mix.num_prompt_tokens)
        document = draw.randrange(NUM_DOCUMENTS)
        num_shared = draw.randrange(num_prompt_tokens)
        shared = [(document * 31 + place) % 509 for place in range(num_shared)]
        own = [(number * 7 + place * 3) % 503 for place in range(num_prompt_tokens - num_shared)]
        return Request(
            request_id=f"cmpl-benchmark-{number:06d}-0",
            prompt_token_ids=shared + own,
            sampling_params=SamplingParams(max_tokens=draw.randint(*self._mix.num_output_tokens), ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )


class _Engine:
    """Steps the scheduler and says what workers would: asynchronous copies take `STEPS_BESIDE` of them."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._beside: deque[tuple[int, int]] = deque()
        """(step in which it is done, job id), oldest first."""
        self._num_steps = 0

    def step(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        self._num_steps += 1
        scheduler_output = self._scheduler.schedule()
        request_ids = list(scheduler_output.num_scheduled_tokens)
        sampled = []
        for request_id in request_ids:
            request = self._scheduler.requests[request_id]
            sampled.append([7] if request.num_computed_tokens >= request.num_tokens else [])
        output = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
            kv_connector_output=self._reports(scheduler_output.kv_connector_metadata),
        )
        self._scheduler.update_from_output(scheduler_output, output)

    def _reports(self, jobs: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput

        from kvledger.adapters.vllm.metadata import JobReport, WorkerReports

        done = [job.job_id for job in (*jobs.saves_before_forward, *jobs.loads, *jobs.saves)]
        for job in (*jobs.async_loads, *jobs.async_saves):
            self._beside.append((self._num_steps + STEPS_BESIDE, job.job_id))
        for entry in [entry for entry in self._beside if entry[0] <= self._num_steps or entry[1] in jobs.awaited]:
            self._beside.remove(entry)
            done.append(entry[1])
        reports = tuple(JobReport(job_id, 0, done=True, num_bytes=4096, duration_ns=50_000) for job_id in done)
        return KVConnectorOutput(
            finished_sending=set(jobs.finished_saves),
            finished_recving=set(jobs.failed_loads),
            invalid_block_ids=set(jobs.undeliverable_block_ids),
            kv_connector_worker_meta=WorkerReports(reports) if reports else None,
        )
