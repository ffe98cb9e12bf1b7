"""Handles differences between vLLM 0.32 and 0.33 for the simulation, as `vllm/versions.py` does for the connector.

This module depends on no engine and no model.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, cast

from vllm.config import VllmConfig
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

UNLIMITED_BYTES = 1 << 40
"""Bytes of memory, more than is needed, because `num_gpu_blocks_override` decides the number of blocks."""


def kv_cache_configs(settings: VllmConfig, specs: Mapping[str, KVCacheSpec], num_ranks: int) -> list[KVCacheConfig]:
    """Return each worker's KV cache configuration, for layers that all workers have.

    vLLM 0.33 makes the groups of layers before it profiles memory, and passes them to `get_kv_cache_configs`
    (`v1/engine/core.py`, _initialize_kv_caches, and `v1/core/kv_cache_planning.py`). In vLLM 0.32,
    `get_kv_cache_configs` makes the groups itself (`v1/core/kv_cache_utils.py`).
    """
    of_ranks, bytes_of_ranks = [dict(specs) for _ in range(num_ranks)], [UNLIMITED_BYTES] * num_ranks
    if hasattr(kv_cache_utils, "get_kv_cache_configs"):
        return kv_cache_utils.get_kv_cache_configs(settings, of_ranks, bytes_of_ranks)
    planning: Any = importlib.import_module("vllm.v1.core.kv_cache_planning")
    groups = planning.get_global_kv_cache_groups(settings, of_ranks)
    return cast("list[KVCacheConfig]", planning.get_kv_cache_configs(settings, of_ranks, bytes_of_ranks, groups))
