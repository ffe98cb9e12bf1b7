"""A server without a model: vLLM's real `Scheduler` with a connector, stepped by hand, and clients that never run out.

Workers are not run. What they would send back is said for them, in each connector's own terms: copies within a step
are done at once, asynchronous ones some steps later. What is scheduled follows from the load alone, but for what the
connector decides.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from vllm.config import SpeculativeConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata
from vllm.v1.structured_output import StructuredOutputManager

from kvledger.adapters.lab.simulation.connectors import KVLEDGER_TRANSFER
from kvledger.adapters.lab.simulation.engine import kv_cache_config, vllm_config
from kvledger.adapters.lab.simulation.hashed_model import block_bytes
from kvledger.adapters.vllm.metadata import JobReport, PageJob, StepJobs, WorkerReports
from kvledger.storage.events.segment_bytes import num_written_bytes

BLOCK_SIZE = 16
_ENDLESS = 4096
"""Output tokens of requests that are not to end while they are watched."""


@attrs.frozen
class Load:
    """How a server is used. Token counts are drawn evenly from the ranges."""

    num_requests: int = 256
    num_waiting: int = 0
    """Requests that are wanted beyond those that may run."""
    num_prompt_tokens: tuple[int, int] = (100, 355)
    """They lie as far apart as a chunk is long, so that chunks fill in every step."""
    num_output_tokens: tuple[int, int] | None = None
    """None: nobody ends. Otherwise the ends of the first requests are spread evenly over such a life."""
    num_long_prompts: int = 0
    """Of 8,192 tokens, so many of them at any time beside the others."""
    num_shared_beginnings: int = 0
    """Documents of which prompts may begin with a part; 0: every prompt is its own."""
    num_drafts: int = 0
    """Draft tokens a request and step, of which none to all are accepted."""
    num_blocks: int = 0
    """0: room for everything."""
    max_num_batched_tokens: int = 8192
    enable_prefix_caching: bool = True
    num_steps_before: int = 10
    """Until prompts are saved and a pool is as full as it will be; these steps are not timed."""
    steps_to_copy: int = 3
    """After how many steps an asynchronous copy of kvledger's is done."""

    @property
    def max_model_len(self) -> int:
        """The longest that a request can become."""
        most = (self.num_output_tokens or (0, _ENDLESS))[1]
        return max(self.num_prompt_tokens[1] + most, 8192 + 64 if self.num_long_prompts else 0)

    def pool(self, num_steps: int) -> int:
        """Blocks on the device."""
        most = (
            self.num_output_tokens[1]
            if self.num_output_tokens
            else (num_steps + self.num_steps_before) * (1 + self.num_drafts)
        )
        each = (self.num_prompt_tokens[1] + min(most, _ENDLESS)) // BLOCK_SIZE + 4
        return self.num_blocks or self.num_requests * each + self.num_long_prompts * 1100


def ours(host_pages: int, **extra: object) -> dict[str, Any]:
    """The `kv_transfer_config` of kvledger's connector."""
    extra["host_bytes"] = block_bytes(BLOCK_SIZE) * host_pages
    return {**KVLEDGER_TRANSFER, "kv_connector_extra_config": extra}


def peers(host_pages: int) -> dict[str, dict[str, Any]]:
    """The connectors of vLLM itself, saving outputs as kvledger does. Their pages are at least one of memory."""
    page_bytes = max(block_bytes(BLOCK_SIZE), mmap.PAGESIZE)
    return {
        "OffloadingConnector": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": page_bytes * host_pages, "offload_prompt_only": False},
        },
        "SimpleCPUOffloadConnector": {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": block_bytes(BLOCK_SIZE) * host_pages},
        },
    }


NOTHING: Mapping[str, Any] = {
    "kv_connector": "Witness",
    "kv_connector_module_path": "sim.witness",
    "kv_role": "kv_both",
}
"""A connector that does nothing: what vLLM itself does as soon as there is one."""

NOBODY = "no connector"
MakeTransfer = Callable[[Path], Mapping[str, Any] | None]
"""Returns the `kv_transfer_config` for a log in this folder; None for no connector."""


def connectors(host_pages: int) -> dict[str, MakeTransfer]:
    """None, kvledger with chunks of 256 tokens and of one block, and vLLM's own."""

    def kvledger(chunk_size: int) -> MakeTransfer:
        return lambda log_dir: ours(host_pages, log_dir=str(log_dir), chunk_size=chunk_size)

    def given(transfer: Mapping[str, Any] | None) -> MakeTransfer:
        return lambda _log_dir: transfer

    return {
        NOBODY: given(None),
        "KVLedgerConnector, chunk 256": kvledger(256),
        f"KVLedgerConnector, chunk {BLOCK_SIZE}": kvledger(BLOCK_SIZE),
        **{name: given(transfer) for name, transfer in peers(host_pages).items()},
    }


def log_bytes(log_dir: Path) -> int:
    """Bytes that were appended to the logs in a folder. Closed segments count as they were before compression."""
    return sum(num_written_bytes(path) for path in log_dir.rglob("*.kvlog"))


@attrs.frozen
class Stepped:
    """What the scheduler returned in one step."""

    scheduled: SchedulerOutput
    outputs: Mapping[int, EngineCoreOutputs]
    """Client → its outputs. One of them has the statistics of the step."""


class Server:
    """One scheduler with one connector under a load."""

    def __init__(self, load: Load, kv_transfer: Mapping[str, Any] | None, *, num_steps: int) -> None:
        # The tiny model has fewer positions than the contexts that are asked for; nobody computes them.
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        num_blocks = load.pool(num_steps)
        config = vllm_config(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=load.num_requests,
            max_num_batched_tokens=load.max_num_batched_tokens,
            max_model_len=load.max_model_len,
            enable_prefix_caching=load.enable_prefix_caching,
            async_scheduling=False,
            kv_transfer=None if kv_transfer is None else dict(kv_transfer),
        )
        if load.num_drafts:
            config.speculative_config = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=load.num_drafts,
                prompt_lookup_max=2,
                target_model_config=config.model_config,
                target_parallel_config=config.parallel_config,
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
        self._load = load
        self._hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)
        self._num_arrived = 0
        self._long: set[str] = set()
        self._copying: deque[tuple[int, tuple[int, ...]]] = deque()
        """(step in which it is done, job id), oldest first."""
        self.num_steps = self.num_preemptions = 0
        self.schedule_ns: list[int] = []
        """Thread CPU time of each `schedule()`, with the `add_request` of those that arrived."""
        self.update_ns: list[int] = []

    @property
    def num_arrived(self) -> int:
        """Requests that were added so far."""
        return self._num_arrived

    def warm_up(self) -> None:
        """Step until everybody who may run decodes, or longer; nothing of it is timed."""
        while self.num_steps < self._load.num_steps_before or any(
            request.num_output_tokens == 0 for request in self.scheduler.running
        ):
            self.step()
        self.schedule_ns.clear()
        self.update_ns.clear()
        self.num_preemptions = 0

    def step(self) -> Stepped:
        """One engine step; only the scheduler's calls are timed."""
        self.num_steps += 1
        arrived = self._arrivals()
        started = time.thread_time_ns()
        for request in arrived:
            self.scheduler.add_request(request)
        scheduler_output = self.scheduler.schedule()
        self.schedule_ns.append(time.thread_time_ns() - started)
        self.num_preemptions += len(scheduler_output.preempted_req_ids or ())
        output = self._output(scheduler_output)
        started = time.thread_time_ns()
        outputs = self.scheduler.update_from_output(scheduler_output, output)
        self.update_ns.append(time.thread_time_ns() - started)
        if self._load.num_drafts:
            drafts = [[7] * self._load.num_drafts for _ in output.req_ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(output.req_ids, drafts))
        return Stepped(scheduler_output, outputs)

    def _arrivals(self) -> list[Request]:
        """As many as have ended; the first long prompts come when everybody else is there."""
        load = self._load
        self._long &= self.scheduler.requests.keys()
        wanted = load.num_requests + load.num_waiting - load.num_long_prompts
        requests = [self._request() for _ in range(wanted - len(self.scheduler.requests) + len(self._long))]
        if self.num_steps > 1:
            requests += [self._request(is_long=True) for _ in range(load.num_long_prompts - len(self._long))]
        return requests

    def _request(self, *, is_long: bool = False) -> Request:
        load, number = self._load, self._num_arrived
        draw = random.Random(number)
        num_prompt_tokens, num_outputs = 8192, 4
        if not is_long:
            num_prompt_tokens = draw.randint(*load.num_prompt_tokens)
            num_outputs = draw.randint(*load.num_output_tokens) if load.num_output_tokens else _ENDLESS
            if load.num_output_tokens and number < load.num_requests:
                num_outputs = 1 + num_outputs * number // load.num_requests
        num_shared = draw.randrange(num_prompt_tokens) if load.num_shared_beginnings else 0
        document = draw.randrange(load.num_shared_beginnings or 1)
        shared = [(document * 31 + place) % 509 for place in range(num_shared)]
        own = [number % 512, number // 512, *(place % 503 for place in range(num_prompt_tokens - num_shared))]
        request = self._new_request((shared + own)[:num_prompt_tokens], num_outputs)
        if is_long:
            self._long.add(request.request_id)
        return request

    def _new_request(self, prompt_token_ids: list[int], num_outputs: int) -> Request:
        """The next request, with a prompt that is hashed before it arrives."""
        number = self._num_arrived
        self._num_arrived += 1
        return Request(
            request_id=f"cmpl-benchmark-{number:06d}-0",
            prompt_token_ids=prompt_token_ids,
            sampling_params=SamplingParams(max_tokens=num_outputs, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def _output(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        request_ids = list(scheduler_output.num_scheduled_tokens)
        sampled = []
        for number, request_id in enumerate(request_ids):
            request = self.scheduler.requests[request_id]
            num_drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(request_id, ()))
            num_accepted = (number + self.num_steps) % (num_drafts + 1)
            sampled.append([7] * (1 + num_accepted) if request.num_computed_tokens >= request.num_tokens else [])
        has_connector = self.scheduler.connector is not None
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
            kv_connector_output=self._of_workers(scheduler_output.kv_connector_metadata) if has_connector else None,
        )

    def _of_workers(self, metadata: Any) -> KVConnectorOutput:
        """What the workers of each connector would send back."""
        if isinstance(metadata, StepJobs):
            return self._of_our_workers(metadata)
        if isinstance(metadata, OffloadingConnectorMetadata):
            jobs = dict.fromkeys((*metadata.load_jobs, *metadata.store_jobs), 1)
            loaded = {job.req_id for job in metadata.load_jobs.values()}
            return KVConnectorOutput(
                finished_recving=loaded, kv_connector_worker_meta=OffloadingWorkerMetadata(jobs) if jobs else None
            )
        if isinstance(metadata, SimpleCPUOffloadMetadata):
            loaded = set(metadata.load_event_to_reqs.get(metadata.load_event, ()))
            stored = {metadata.store_event: 1} if metadata.store_event >= 0 else None
            return KVConnectorOutput(
                finished_recving=loaded,
                kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(stored) if stored else None,
            )
        return KVConnectorOutput()

    def _of_our_workers(self, jobs: StepJobs) -> KVConnectorOutput:
        # As a worker does: what is saved in a step is one copy, each load is one.
        done = [_ids(jobs.saves_before_forward), *((load.job_id,) for load in jobs.loads), _ids(jobs.saves)]
        ready = self.num_steps + self._load.steps_to_copy
        self._copying += (
            (ready, job_ids) for job_ids in (*((load.job_id,) for load in jobs.async_loads), _ids(jobs.async_saves))
        )
        awaited = set(jobs.awaited)
        arrived = [entry for entry in self._copying if entry[0] <= self.num_steps or not awaited.isdisjoint(entry[1])]
        for entry in arrived:
            self._copying.remove(entry)
            done.append(entry[1])
        reports = tuple(
            JobReport(job_ids, 0, done=True, num_bytes=4096, duration_ns=50_000) for job_ids in done if job_ids
        )
        return KVConnectorOutput(
            finished_sending=set(jobs.finished_saves),
            finished_recving=set(jobs.failed_loads),
            invalid_block_ids=set(jobs.undeliverable_block_ids),
            kv_connector_worker_meta=WorkerReports(reports) if reports else None,
        )


def _ids(jobs: Sequence[PageJob]) -> tuple[int, ...]:
    return tuple(job.job_id for job in jobs)
