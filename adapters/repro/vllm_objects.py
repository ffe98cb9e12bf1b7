"""vLLM's own objects made from plain values, as the hooks receive them. The only room here that imports vLLM.

Read against vLLM 0.32.0, like `adapters/vllm/versions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvledger.adapters.recorder.connector import KVLedgerRecorder, KVLedgerRecorderHMA
from kvledger.adapters.recorder.said import Began, WorkersReported
from kvledger.adapters.repro.recording import NotReenactable
from kvledger.adapters.repro.workers import worker_metadata
from kvledger.adapters.simulation.engine import vllm_config
from kvledger.adapters.simulation.tiny_model import MAX_MODEL_LEN
from kvledger.adapters.vllm import KVLedgerConnector
from kvledger.adapters.vllm.configuration import LARGE_LOAD_BYTES
from kvledger.adapters.vllm.metadata import JobReport, WorkerReports
from kvledger.lifecycle import events as e

if TYPE_CHECKING:
    from kvledger.adapters.repro.connector import ScheduledRequest, Step
    from kvledger.lifecycle import LedgerConfiguration


class _ZeroingCacheConfig(KVCacheConfig):
    """Of a model whose new blocks are zeroed."""

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        return True


class Engine:
    """A vLLM configuration under which the connector gets the ledger configuration of a log."""

    def __init__(
        self, configuration: LedgerConfiguration, *, speculates: bool, zeroes_new_blocks: bool, num_blocks: int
    ) -> None:
        self._configuration = configuration
        self._block_bytes = _block_bytes(configuration)
        self._speculates = speculates
        config_class = _ZeroingCacheConfig if zeroes_new_blocks else KVCacheConfig
        self._cache_config = _cache_config(config_class, configuration, self._block_bytes, num_blocks)
        block_size = configuration.block_size
        self._cache = CacheConfig(block_size=block_size)
        hash_function = get_hash_fn_by_name(self._cache.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._block_hasher = get_request_block_hasher(block_size, hash_function)

    def extra_config(self) -> dict[str, Any]:
        """`kv_connector_extra_config` that leads to the configuration."""
        of = self._configuration
        load_mode = {None: "sync", 0: "async"}.get(of.async_load_tokens, "auto")
        return {
            "log_dir": None,
            "host_bytes": of.num_slots * self._block_bytes * of.num_ranks,
            "chunk_size": of.chunk_size,
            "max_hit_share": of.max_hit_share,
            "chunk_statistics": of.chunk_statistics,
            "save_tails": of.save_tails,
            "keep_for_preempted": of.keep_for_preempted,
            "load_mode": load_mode,
            "save_mode": "async" if of.async_saves else "sync",
            "max_deferred_lookups": of.max_deferred_lookups,
            "max_failed_loads": of.max_failed_loads,
            "max_silent_steps": of.max_silent_steps,
            "max_silent_ms": of.max_silent_ms,
        }

    def connector(self, extra_config: dict[str, Any], clock: Callable[[], int]) -> KVLedgerConnector:
        """The scheduler's half."""
        config = VllmConfig(
            cache_config=self._cache,
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVLedgerConnector",
                kv_connector_module_path="kvledger.adapters.vllm",
                kv_role="kv_both",
                kv_connector_extra_config=extra_config,
            ),
        )
        config.scheduler_config.async_scheduling = False
        config.parallel_config.world_size = self._configuration.num_ranks
        if self._speculates:
            speculation: Any = object()
            config.speculative_config = speculation
        connector_class = type("KVLedgerConnector", (KVLedgerConnector,), {"clock": staticmethod(clock)})
        made: KVLedgerConnector = connector_class(config, KVConnectorRole.SCHEDULER, self._cache_config)
        return made

    def set_tokens(self, request: Request, first: int, token_ids: Sequence[int]) -> None:
        """Let a request have these tokens from `first` on, and hash its blocks again from there, as vLLM does."""
        outputs: list[int] = request._output_token_ids  # noqa: SLF001 -- as vLLM's scheduler cuts a session
        tokens: list[int] = request._all_token_ids  # noqa: SLF001
        del outputs[max(0, len(outputs) - (len(tokens) - first)) :]
        del tokens[first:]
        del request.block_hashes[first // self._configuration.block_size :]
        request.append_output_token_ids(list(token_ids))

    def request(self, request_id: str, token_ids: Sequence[int]) -> Request:
        """A request that was just accepted."""
        return Request(
            request_id=request_id,
            prompt_token_ids=list(token_ids),
            sampling_params=SamplingParams(max_tokens=1, temperature=0),
            pooling_params=None,
            arrival_time=0.0,
            block_hasher=self._block_hasher,
        )


class WrappedEngine(Engine):
    """A vLLM configuration like the one in which a recorder was, around the connector that it was around."""

    def __init__(self, configuration: LedgerConfiguration, wrapped: Began, *, speculates: bool) -> None:
        super().__init__(
            configuration, speculates=speculates, zeroes_new_blocks=False, num_blocks=max(1, wrapped.num_blocks)
        )
        width = max(2, wrapped.block_bytes // configuration.block_size)
        self._cache_config = _cache_config(
            KVCacheConfig,
            configuration,
            wrapped.block_bytes,
            max(1, wrapped.num_blocks),
            head_size=width // 2,
        )
        self._wrapped = wrapped

    def connector(self, extra_config: dict[str, Any], clock: Callable[[], int]) -> KVLedgerRecorder:  # type: ignore[override]
        """The scheduler's half of the recorder, with the scheduler's half of the wrapped connector in it."""
        wrapped = self._wrapped
        config = vllm_config(
            num_blocks=wrapped.num_blocks,
            block_size=self._configuration.block_size,
            max_num_seqs=wrapped.max_num_seqs,
            max_num_batched_tokens=wrapped.max_num_batched_tokens,
            max_model_len=min(wrapped.max_model_len, MAX_MODEL_LEN),
            enable_prefix_caching=wrapped.enable_prefix_caching,
            async_scheduling=False,
            kv_transfer={
                "kv_connector": wrapped.recorder,
                "kv_connector_module_path": "kvledger.adapters.recorder",
                "kv_role": wrapped.kv_transfer["kv_role"],
                "kv_connector_extra_config": {**extra_config, "connector": wrapped.kv_transfer},
            },
        )
        config.scheduler_config.async_scheduling = wrapped.async_scheduling
        config.parallel_config.world_size = wrapped.num_ranks
        if self._speculates:
            speculation: Any = object()
            config.speculative_config = speculation
        recorder = {"KVLedgerRecorder": KVLedgerRecorder, "KVLedgerRecorderHMA": KVLedgerRecorderHMA}[wrapped.recorder]
        made = type(wrapped.recorder, (recorder,), {"clock": staticmethod(clock)})
        connector: KVLedgerRecorder = made(config, KVConnectorRole.SCHEDULER, self._cache_config)
        return connector

    def workers_output(
        self, reported: WorkersReported, completed: Sequence[str], connector: object
    ) -> KVConnectorOutput:
        """What comes back of a step, with copies that all workers have completed."""
        return KVConnectorOutput(
            finished_sending=set(reported.finished_sending) or None,
            finished_recving=set(reported.finished_recving) or None,
            failed_recving=set(reported.failed_recving),
            invalid_block_ids=set(reported.invalid_block_ids),
            kv_connector_worker_meta=worker_metadata(
                dict.fromkeys(completed, self._wrapped.num_ranks), getattr(connector, "_connectors", ())
            ),
        )


def _block_bytes(configuration: LedgerConfiguration) -> int:
    """Bytes of a block for which loads of the configured size run beside the steps."""
    granularity = configuration.block_size
    if not configuration.async_load_tokens:
        return 2 * granularity
    num_blocks = configuration.async_load_tokens // configuration.block_size
    smallest = -(-LARGE_LOAD_BYTES // num_blocks)
    return -(-smallest // granularity) * granularity


def _cache_config(
    config_class: type[KVCacheConfig],
    configuration: LedgerConfiguration,
    block_bytes: int,
    num_blocks: int,
    *,
    head_size: int = 0,
) -> KVCacheConfig:
    """With heads of that size, or of one that fills the block."""
    block_size = configuration.block_size
    width = block_bytes // block_size
    sizes: dict[str, Any] = {"block_size": block_size, "num_kv_heads": 1, "dtype": torch.uint8}
    groups, names = [], []
    for number, window in enumerate(configuration.windows):
        spec: Any
        if window:
            spec = SlidingWindowSpec(sliding_window=window, head_size=head_size or _halved(width), **sizes)
        elif head_size or any(configuration.windows):
            spec = FullAttentionSpec(head_size=head_size or _halved(width), **sizes)
        else:
            spec = MLAAttentionSpec(head_size=width, **sizes)
        names.append(f"layer {number}")
        groups.append(KVCacheGroupSpec([names[-1]], spec))
    tensors = [
        KVCacheTensor(size=block_bytes * num_blocks, layers=[name], layer_stride=block_bytes, block_stride=block_bytes)
        for name in names
    ]
    return config_class(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


def _halved(width: int) -> int:
    """The head size of a layer with keys and values."""
    if width % 2:
        raise NotReenactable(f"{width} bytes a token cannot be halved into keys and values")
    return width // 2


# --- values ---------------------------------------------------------------------------------------


def tables(block_ids: Sequence[int], num_groups: int) -> tuple[list[int], ...]:
    """The groups' tables of a flat one."""
    return tuple(list(block_ids[group::num_groups]) for group in range(num_groups))


def kv_cache_blocks(block_ids: Sequence[int], num_groups: int) -> KVCacheBlocks:
    """What the scheduler hands over when it gives blocks."""
    return KVCacheBlocks(
        tuple(
            [KVCacheBlock(block_id, is_null=not block_id) for block_id in table]
            for table in tables(block_ids, num_groups)
        )
    )


def status(name: str) -> RequestStatus:
    """How a request ended."""
    return RequestStatus[name]


def job_reports(report: e.TransferReported) -> list[JobReport]:
    """What each rank says, so that together they say this."""
    ranks = sorted((*report.ranks_done, *report.ranks_failed))
    return [
        JobReport(
            report.job_id,
            rank,
            done=rank in report.ranks_done,
            num_bytes=report.num_bytes if rank == ranks[0] else 0,
            duration_ns=report.duration_ns,
            error=report.error if rank in report.ranks_failed or not report.ranks_failed else "",
            is_repeated=report.is_repeated,
        )
        for rank in ranks
    ]


def connector_output(
    reports: tuple[JobReport, ...], load_errors: set[int], finished_sending: set[str]
) -> KVConnectorOutput:
    """What comes back of a step."""
    return KVConnectorOutput(
        finished_sending=finished_sending or None,
        invalid_block_ids=load_errors,
        kv_connector_worker_meta=WorkerReports(reports) if reports else None,
    )


def scheduler_output(step: Step, requests: Mapping[str, Request], num_groups: int) -> SchedulerOutput:
    """One step as the scheduler describes it."""
    new = [part for part in step.scheduled if part.is_new]
    cached = [part for part in step.scheduled if not part.is_new]
    places = {request_id: place for place, request_id in enumerate(step.admitted_request_ids)}
    in_order = sorted(step.scheduled, key=lambda part: places.get(part.request_id, -1))
    num_scheduled_tokens = {part.request_id: part.num_scheduled_tokens for part in in_order}
    output = SchedulerOutput(
        scheduled_new_reqs=[_new_request(part, requests, step, num_groups) for part in new],
        scheduled_cached_reqs=_cached_requests(cached, requests, step, num_groups),
        num_scheduled_tokens=num_scheduled_tokens,
        total_num_scheduled_tokens=sum(num_scheduled_tokens.values()),
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        finished_req_ids=set(step.ended_request_ids),
        free_encoder_mm_hashes=[],
        preempted_req_ids=set(step.preempted_request_ids),
        new_block_ids_to_zero=list(step.zeroed_block_ids) or None,
    )
    output.kv_connector_block_state = KVConnectorBlockState(
        req_ids=set(step.block_tables),
        resolve_block_ids=lambda request_id: tables(step.block_tables[request_id], num_groups),
        boundary_state_offloads={},
    )
    return output


def _new_request(
    part: ScheduledRequest, requests: Mapping[str, Request], step: Step, num_groups: int
) -> NewRequestData:
    request = requests[part.request_id]
    return NewRequestData(
        req_id=part.request_id,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=[],
        sampling_params=request.sampling_params,
        pooling_params=None,
        block_ids=tables(step.block_tables[part.request_id], num_groups),
        num_computed_tokens=part.num_computed_tokens,
        lora_request=None,
    )


def _cached_requests(
    parts: Iterable[ScheduledRequest], requests: Mapping[str, Request], step: Step, num_groups: int
) -> CachedRequestData:
    parts = list(parts)
    blocks = [step.block_tables[part.request_id] if part.is_resumed else part.new_block_ids for part in parts]
    return CachedRequestData(
        req_ids=[part.request_id for part in parts],
        resumed_req_ids={part.request_id for part in parts if part.is_resumed},
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[tables(block_ids, num_groups) if block_ids else None for block_ids in blocks],
        num_computed_tokens=[part.num_computed_tokens for part in parts],
        num_output_tokens=[
            requests[part.request_id].num_output_tokens if part.request_id in requests else 0 for part in parts
        ],
    )
