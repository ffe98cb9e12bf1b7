"""What is wrapped and in what engine: enough to make such a connector again, and nothing that must not be in a log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvledger.adapters.recorder.payloads import RecordingStarted
from kvledger.adapters.vllm import versions

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

NOT_RECORDED = "(not recorded)"
"""Stands in the place of what may be a secret, or is no plain value."""
_SECRET = re.compile(r"secret|token|password|passwd|credential|key|auth|salt", re.IGNORECASE)
_CREDENTIALS = re.compile(r"://[^/@\s]+@")


def described(
    recorder: str, config: VllmConfig, kv_cache_config: KVCacheConfig, transfer: KVTransferConfig
) -> RecordingStarted:
    """Describe the wrapped connector and its engine.

    Args:
        recorder: the recorder's class.
        config: vLLM's.
        kv_cache_config: the scheduler's.
        transfer: of the wrapped connector.
    """
    scheduler = config.scheduler_config
    return RecordingStarted(
        recorder=recorder,
        kv_transfer={
            "kv_connector": transfer.kv_connector,
            "kv_connector_module_path": transfer.kv_connector_module_path,
            "kv_role": transfer.kv_role,
            "kv_load_failure_policy": transfer.kv_load_failure_policy,
            "kv_connector_extra_config": _plain(transfer.kv_connector_extra_config),
        },
        num_blocks=kv_cache_config.num_blocks or 0,
        block_bytes=versions.block_bytes(kv_cache_config) if kv_cache_config.kv_cache_tensors else 0,
        num_ranks=config.parallel_config.world_size,
        enable_prefix_caching=bool(config.cache_config.enable_prefix_caching),
        async_scheduling=bool(scheduler.async_scheduling),
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=config.model_config.max_model_len,
    )


def _plain(value: Any, name: str = "") -> Any:
    """Numbers, texts, and lists and mappings of them; a text under a name that sounds like a secret is left out."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, name) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str) and not _SECRET.search(name):
        return _CREDENTIALS.sub(f"://{NOT_RECORDED}@", value)
    return NOT_RECORDED
