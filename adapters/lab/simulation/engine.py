"""A simulated engine core: vLLM's real `Scheduler`, both sides of a real connector, and `HashedModel` as the model.

It calls the connector's hooks in the same order as vLLM 0.32 and 0.33 (`v1/engine/core.py`,
`v1/worker/gpu_model_runner.py`, `v1/worker/kv_connector_model_runner_mixin.py`), so the connector sees no difference
from a real engine.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import (
    DEFAULT_NONE_HASH_SEED,
    BlockHash,
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

from kvledger.adapters.lab.simulation.connectors import KVLEDGER, ConnectorSetup
from kvledger.adapters.lab.simulation.hashed_model import BLOCK_SIZE, NUM_LAYERS, HashedModel, layer_names
from kvledger.adapters.lab.simulation.order import put_in_order
from kvledger.adapters.lab.simulation.tiny_model import tiny_configuration
from kvledger.adapters.lab.simulation.versions import kv_cache_configs
from kvledger.adapters.vllm import KVLedgerConnector


def kv_cache_config(num_blocks: int, block_size: int, windows: Sequence[int] = (0,)) -> KVCacheConfig:
    """Return a configuration for `HashedModel` with one group for each window, in tokens (0: full attention).

    In `HashedModel`, the layers of all groups use the same bytes.
    """
    sizes: dict[str, Any] = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.int64}
    tensors, groups = [], []
    for window, names in zip(windows, layer_names(len(windows)), strict=True):
        spec = SlidingWindowSpec(sliding_window=window, **sizes) if window else FullAttentionSpec(**sizes)
        page, layers = spec.page_size_bytes, list(names)
        size = page * num_blocks * NUM_LAYERS
        tensors.append(KVCacheTensor(size=size, layers=layers, layer_stride=page * num_blocks, block_stride=page))
        groups.append(KVCacheGroupSpec(layers, spec))
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


def allocate(
    settings: VllmConfig, specs: Mapping[str, KVCacheSpec], layout: str, num_blocks: int, num_ranks: int
) -> tuple[KVCacheConfig, list[KVCacheConfig], list[dict[str, torch.Tensor]]]:
    """Allocate the KV caches of a model's layers, as `v1/engine/core.py` and `v1/worker/gpu_model_runner.py` do.

    Returns the scheduler's configuration, each worker's configuration, and the tensors that each worker registers.
    """
    settings.cache_config.kv_cache_layout = layout
    settings.cache_config.num_gpu_blocks_override = num_blocks
    of_workers = kv_cache_configs(settings, specs, num_ranks)
    for config in of_workers:
        config.kv_cache_layout = layout
    of_scheduler = generate_scheduler_kv_cache_config(of_workers)
    device = torch.device("cpu")
    return of_scheduler, of_workers, [allocate_kv_cache(config, device, KVCacheLayout[layout]) for config in of_workers]


def vllm_config(
    *,
    num_blocks: int,
    kv_transfer: dict[str, Any] | None,
    block_size: int = 16,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 256,
    max_model_len: int = 512,
    enable_prefix_caching: bool = True,
    async_scheduling: bool = False,
    policy: str = "fcfs",
    long_prefill_token_threshold: int = 0,
    kv_events: bool = False,
) -> VllmConfig:
    """Return the configuration of a vLLM engine that schedules for a tiny model on a CPU."""
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching)
    cache.num_gpu_blocks = num_blocks
    return VllmConfig(
        model_config=ModelConfig(
            model=str(tiny_configuration()),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=max_model_len,
            enforce_eager=True,
        ),
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=async_scheduling,
            policy=policy,  # type: ignore[arg-type]
            long_prefill_token_threshold=long_prefill_token_threshold,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=None if kv_transfer is None else KVTransferConfig(**kv_transfer),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=kv_events, publisher="null"),
    )


class SimulatedEngine:
    """Runs requests on the simulated model. Raises `CorruptKV` as soon as a request would read wrong KV.

    Each rank has its own worker and its own KV. The outputs of the ranks are combined as in vLLM's executors.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = BLOCK_SIZE,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        max_model_len: int = 1024,
        enable_prefix_caching: bool = True,
        async_scheduling: bool = False,
        model_runner_v2: bool = False,
        policy: str = "fcfs",
        long_prefill_token_threshold: int = 0,
        defer_finalize: bool = False,
        setup: ConnectorSetup = KVLEDGER,
        num_ranks: int = 1,
        windows: Sequence[int] = (0,),
        specs: Mapping[str, KVCacheSpec] | None = None,
        layout: str = "LBNHC",
        kv_transfer: dict[str, Any] | None = None,
        subscriber: Any = None,
        **extra_config: Any,
    ) -> None:
        # The result must not depend on the speed of this machine's disk.
        transfer = setup.kv_transfer({"log_dir": None, "max_log_wait_ms": None, **extra_config}, kv_transfer or {})
        self.vllm_config = vllm_config(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            async_scheduling=async_scheduling,
            kv_transfer=transfer,
            policy=policy,
            long_prefill_token_threshold=long_prefill_token_threshold,
            kv_events=subscriber is not None,
        )
        # VllmConfig turns it off on platforms without an asynchronous worker; here there is one.
        self.vllm_config.scheduler_config.async_scheduling = async_scheduling
        parallel = self.vllm_config.parallel_config
        parallel.world_size = parallel.tensor_parallel_size = num_ranks
        parallel.distributed_executor_backend = "mp"
        registered: list[dict[str, torch.Tensor] | None] = [None] * num_ranks
        if specs is None:
            cache_config = kv_cache_config(num_blocks, block_size, windows)
            worker_configs = [cache_config] * num_ranks
        else:
            cache_config, worker_configs, registered[:] = allocate(
                self.vllm_config, specs, layout, num_blocks, num_ranks
            )
        hash_function = get_hash_fn_by_name(self.vllm_config.cache_config.prefix_caching_hash_algo)
        # Not `init_none_hash`, which uses PYTHONHASHSEED if it is set: a seed must decide a world's keys, too.
        kv_cache_utils.NONE_HASH = BlockHash(hash_function(DEFAULT_NONE_HASH_SEED))
        self._block_hasher = get_request_block_hasher(block_size, hash_function)
        scheduler_class = AsyncScheduler if async_scheduling else Scheduler
        self.scheduler = scheduler_class(
            vllm_config=self.vllm_config,
            kv_cache_config=cache_config,
            structured_output_manager=StructuredOutputManager(self.vllm_config),
            block_size=block_size,
            log_stats=True,
        )
        if subscriber is not None:
            self.scheduler.kv_event_publisher = subscriber
        self.scheduler.use_v2_model_runner = model_runner_v2
        put_in_order(self.scheduler)
        self.models = [HashedModel(num_blocks, block_size, windows, kv_caches) for kv_caches in registered]
        self._ranks = _Ranks()
        self.workers: list[Any] = [None] * num_ranks
        """The worker-side connector of each rank; None without a connector."""
        if self.scheduler.connector is not None:
            self.workers = [self._make_worker(rank, worker_configs[rank], setup) for rank in range(num_ranks)]
            self._aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, num_ranks)
            self._shake_hands(self.scheduler.connector)
        self.model, self.worker = self.models[0], our_child(self.workers[0])
        self.on_output: Callable[[KVConnectorOutput], None] = lambda _output: None
        """Called with the workers' output before the scheduler gets it. May change it, for example lose reports."""
        self.before_update: Callable[[KVConnectorOutput | None], None] = lambda _output: None
        """Called when a step has been computed, before the scheduler processes its output. The engine core handles
        aborts there (`v1/engine/core.py`, `_process_aborts_queue`)."""
        self.outputs: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, str] = {}
        self.may_fail: set[str] = set()
        """Requests that hold or wait for blocks that a load did not fill. The policy "fail" may end these requests."""
        self.num_steps_with_failed_loads = 0
        self.num_preemptions = 0
        self.num_steps = 0
        self._defer_finalize = defer_finalize
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._num_executed = 0
        self.num_steps_processed = 0
        """Steps whose output the scheduler has processed."""
        self._unfilled_in: list[dict[int, int]] = [{} for _ in range(num_ranks)]
        """For each rank: block → latest step in which a load of the block failed, or a load of KV that the block's KV
        was computed on."""
        self._max_in_flight = 2 if async_scheduling else 1

    @property
    def connector(self) -> KVLedgerConnector:
        """Scheduler side of the connector. If it is a `MultiConnector`, this is its child from kvledger."""
        return cast("KVLedgerConnector", our_child(self.scheduler.connector))

    def _make_worker(self, rank: int, cache_config: KVCacheConfig, setup: ConnectorSetup) -> KVConnectorBase_V1:
        config = copy.copy(self.vllm_config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        connector_class: Any = type(self.scheduler.connector)
        worker = setup.prepared(setup.make_worker(connector_class, config, cache_config))
        with mock.patch.object(parallel_state, "_TP", self._ranks):
            worker.register_kv_caches(self.models[rank].kv_caches)
        return worker

    def _shake_hands(self, connector: KVConnectorBase_V1) -> None:
        """Pass the workers' handshake metadata to the scheduler side, as `EngineCore` does (`v1/engine/core.py`)."""
        found = {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        metadata = {ranks: each for ranks, each in found.items() if each is not None}
        if metadata:
            connector.set_xfer_handshake_metadata_pp_aware(metadata)

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        cache_salt: str | None = None,
        reads_prefix_cache: bool = True,
        resumable: bool = False,
        priority: int = 0,
        arrival_time: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> Request:
        """Queue a request that stops after `max_tokens` tokens."""
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                temperature=0,
                skip_reading_prefix_cache=not reads_prefix_cache,
                extra_args=None if kv_transfer_params is None else {"kv_transfer_params": dict(kv_transfer_params)},
            ),
            pooling_params=None,
            cache_salt=cache_salt,
            resumable=resumable,
            priority=priority,
            arrival_time=arrival_time,
            block_hasher=self._block_hasher,
            trace_headers=trace_headers,
        )
        self.scheduler.add_request(request)
        self.outputs.setdefault(request_id, [])
        return request

    def abort(self, request_id: str) -> None:
        """Abort a request, as when its client disconnects."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        """Schedule and execute a step.

        If as many steps as possible are now in flight, or the step computes nothing, process the oldest output.
        """
        scheduler_output = self.scheduler.schedule()
        self.num_preemptions += len(scheduler_output.preempted_req_ids or ())
        self._in_flight.append((scheduler_output, self._execute(scheduler_output)))
        self.num_steps += 1
        if len(self._in_flight) >= self._max_in_flight or not scheduler_output.total_num_scheduled_tokens:
            self.update()
        return scheduler_output

    def update(self) -> None:
        """Process the output of the oldest step in flight."""
        if not self._in_flight:
            return
        transferred = self._in_flight[0][1].kv_connector_output
        self.before_update(transferred)
        if transferred is not None and (transferred.failed_recving or transferred.invalid_block_ids):
            self.num_steps_with_failed_loads += 1
            if not self.scheduler.recompute_kv_load_failures:
                self.may_fail.update(transferred.failed_recving or (), self.holders(transferred.invalid_block_ids))
        outputs = self.scheduler.update_from_output(*self._in_flight.popleft())
        self.num_steps_processed += 1
        for engine_outputs in outputs.values():
            for output in engine_outputs.outputs:
                self.outputs[output.request_id].extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.finish_reasons[output.request_id] = str(output.finish_reason)

    def holders(self, block_ids: Collection[int]) -> list[str]:
        """Return the requests whose block tables have one of these blocks."""
        if not block_ids:
            return []
        tables = self.scheduler.kv_cache_manager.get_block_ids
        return [
            request_id
            for request_id in self.scheduler.requests
            if not set(block_ids).isdisjoint(block_id for table in tables(request_id) for block_id in table)
        ]

    @property
    def excused_blocks(self) -> Collection[int]:
        """Blocks of the first rank that a failed load left with wrong KV, if the scheduler cannot know this yet."""
        return self._excused(self._unfilled_in[0])

    def unfilled_in(self, block_id: int) -> int:
        """Return the latest step in which a failed load left wrong KV in a block of the first rank; -1: none."""
        return self._unfilled_in[0].get(block_id, -1)

    def _excused(self, unfilled_in: dict[int, int]) -> dict[int, int]:
        return {block_id: step for block_id, step in unfilled_in.items() if step >= self.num_steps_processed}

    def drain(self) -> None:
        """Process the outputs of all steps in flight."""
        while self._in_flight:
            self.update()

    @property
    def is_computing(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._in_flight)

    @property
    def is_stranded(self) -> bool:
        """Whether nothing can ever be scheduled again, because of vLLM's queue or reservations.

        vLLM has a queue for waiting requests that hold blocks (`kv_holding_waiting`). The first request in
        this queue has lost its blocks while it waited, and cannot get as many blocks again. The cause is one of these:
        - The loads of later requests in the queue are done, but vLLM does not consider these requests. `schedule` stops
          at the first request that does not fit (vllm#57841, #45388: `v1/core/sched/scheduler.py`).
        - The load of the first request failed, and another connector of a `MultiConnector` offers another load. The
          blocks that are still reserved for the failed load are not free for the other load (vllm#48433:
          `_inflight_prefills`).
        """
        scheduler: Any = self.scheduler
        first, *behind = scheduler.kv_holding_waiting or [None]
        if first is None or scheduler.running or any(scheduler.kv_cache_manager.get_block_ids(first.request_id)):
            return False
        has_come = scheduler.finished_recving_kv_req_ids
        return first in scheduler._inflight_prefills or any(request.request_id in has_come for request in behind)

    def run(self, max_steps: int = 5000) -> None:
        """Run steps until there are no requests and the connector has nothing more to do."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self._in_flight:
                return
            if self.scheduler.has_requests():
                self.step()
            else:
                self.update()
        message = (
            f"still busy after {max_steps} steps; requests (running, waiting): {self.scheduler.get_request_counts()}"
        )
        raise AssertionError(message)

    def shutdown(self) -> None:
        """Shut down both sides."""
        self.scheduler.shutdown()
        for worker in self.workers:
            if worker is not None:
                worker.shutdown()

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        outputs: list[ModelRunnerOutput | None] = []
        for worker, model, unfilled_in in zip(self.workers, self.models, self._unfilled_in, strict=True):
            outputs.append(self._execute_on(worker, model, scheduler_output, unfilled_in))
        self._num_executed += 1
        output = cast("ModelRunnerOutput", self._aggregator.aggregate(outputs) if len(outputs) > 1 else outputs[0])
        if output.kv_connector_output is not None:
            self.on_output(output.kv_connector_output)
        return output

    def _execute_on(
        self,
        worker: KVConnectorBase_V1 | None,
        model: HashedModel,
        scheduler_output: SchedulerOutput,
        unfilled_in: dict[int, int],
    ) -> ModelRunnerOutput:
        if worker is None:
            model.update_states(scheduler_output)
            return _model_runner_output(*model.forward(scheduler_output), None)
        metadata = cast("KVConnectorMetadata", scheduler_output.kv_connector_metadata)
        worker.handle_preemptions(metadata)
        model.update_states(scheduler_output)
        worker.bind_connector_metadata(metadata)
        if scheduler_output.has_sync_kv_loads:
            worker.start_load_kv(_forward_context(model, scheduler_output))
        if scheduler_output.total_num_scheduled_tokens:
            for name in model.kv_caches:  # an attention layer waits for itself alone, before its own forward
                worker.wait_for_layer_load(name)
        output = KVConnectorOutput()
        failed = worker.get_block_ids_with_load_errors()
        unfilled_in.update(dict.fromkeys(failed, self._num_executed))
        excused = self._excused(unfilled_in)
        request_ids, sampled = model.forward(scheduler_output, excused)
        unfilled_in.update(excused)
        if scheduler_output.total_num_scheduled_tokens:
            for name, layer in model.kv_caches.items():
                worker.save_kv_layer(name, layer, None)  # type: ignore[arg-type]
        if not scheduler_output.has_sync_kv_loads:
            worker.start_load_kv(_forward_context(model, scheduler_output))
        # With a drafter, saves follow the drafter's forward, so their results are reported one step later. Runner V1
        # does so in 0.32 and 0.33 (`v1/worker/kv_connector_model_runner_mixin.py`, finalize_kv_connector), V2 in 0.33
        # (`v1/worker/gpu/kv_connector.py`, finalize_step). In 0.32, V2 also reports after the drafter. A step that
        # computes nothing runs no drafter.
        is_deferred = self._defer_finalize and bool(scheduler_output.total_num_scheduled_tokens)
        if not is_deferred:
            worker.wait_for_save()  # type: ignore[no-untyped-call]
        results = worker.get_transfer_results(scheduler_output.finished_req_ids)
        output.finished_sending = results.finished_sending
        output.finished_recving = results.finished_recving
        output.failed_recving = results.failed_recving
        output.invalid_block_ids = failed | worker.get_block_ids_with_load_errors()
        output.kv_connector_stats = worker.get_kv_connector_stats()
        output.kv_connector_worker_meta = worker.build_connector_worker_meta()
        if is_deferred:
            worker.wait_for_save()  # type: ignore[no-untyped-call]
        worker.clear_connector_metadata()
        return _model_runner_output(request_ids, sampled, output)


class _Ranks:
    """Gives every rank what the first rank broadcasts. The ranks run one after the other in this process."""

    def __init__(self) -> None:
        self._sent: Any = None

    def broadcast_object(self, sent: Any, src: int) -> Any:  # noqa: ARG002 -- vLLM's signature
        """Return what the first rank sent."""
        self._sent = sent if self._sent is None else self._sent
        return self._sent


def _forward_context(model: HashedModel, scheduler_output: SchedulerOutput) -> Any:
    """Return the parts of vLLM's forward context that a connector reads when it loads layer by layer.

    See `kv_connector/v1/example_connector.py`, 0.32.
    """
    layers = {name: SimpleNamespace(kv_cache=layer) for name, layer in model.kv_caches.items()}
    attends = scheduler_output.total_num_scheduled_tokens > 0
    return SimpleNamespace(attn_metadata=dict.fromkeys(layers) if attends else None, no_compile_layers=layers)


def our_child(connector: Any) -> Any:
    """Return kvledger's connector if `connector` is a `MultiConnector` with kvledger as a child, else `connector`."""
    if not isinstance(connector, MultiConnector):
        return connector
    return next((child for child in connector.sub_connectors if isinstance(child, KVLedgerConnector)), connector)


def _model_runner_output(
    request_ids: list[str], sampled: list[list[int]], kv_connector_output: KVConnectorOutput | None
) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
        sampled_token_ids=sampled,
        kv_connector_output=kv_connector_output,
    )
