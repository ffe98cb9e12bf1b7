"""Describes the wrapped connector and its engine, without values that may be secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvledger.adapters.recorded.payloads import RecordingStarted
from kvledger.adapters.recorder.options import recorded_options
from kvledger.adapters.vllm import versions

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def described(
    recorder: str, config: VllmConfig, kv_cache_config: KVCacheConfig, transfer: KVTransferConfig
) -> RecordingStarted:
    """Return the event that describes the wrapped connector and its engine.

    Args:
        recorder: name of the recorder's class.
        config: vLLM's configuration.
        kv_cache_config: KV cache configuration of the scheduler.
        transfer: the wrapped connector's part of vLLM's configuration.
    """
    scheduler = config.scheduler_config
    return RecordingStarted(
        recorder=recorder,
        kv_transfer=recorded_options(
            {
                "kv_connector": transfer.kv_connector,
                "kv_connector_module_path": transfer.kv_connector_module_path,
                "kv_role": transfer.kv_role,
                "kv_load_failure_policy": transfer.kv_load_failure_policy,
                "kv_connector_extra_config": transfer.kv_connector_extra_config,
            }
        ),
        num_blocks=kv_cache_config.num_blocks or 0,
        block_bytes=versions.block_bytes(kv_cache_config) if kv_cache_config.kv_cache_tensors else 0,
        num_ranks=config.parallel_config.world_size,
        enable_prefix_caching=bool(config.cache_config.enable_prefix_caching),
        async_scheduling=bool(scheduler.async_scheduling),
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=config.model_config.max_model_len,
        speculates=versions.uses_speculation(config),
    )
