"""What is refused when vLLM's configuration is there and nothing else: no weights, no KV cache, no other process.

Each refusal is the very one that follows later, or is followed by one that would: what the configuration leaves open
is left to the connector. It must not write anything that stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvledger.adapters.vllm import versions
from kvledger.adapters.vllm.configuration import ConnectorSettings
from kvledger.storage.kv import HostMemory, most_memory

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

    from kvledger.adapters.vllm.log_settings import LogSettings


def refuse_connector(transfer: KVTransferConfig, vllm_config: VllmConfig | None) -> ConnectorSettings:
    """Of kvledger's connector; what else it returns is how that is set.

    Args:
        transfer: the connector's part.
        vllm_config: the whole, where it can be seen already.

    Raises:
        ConfigurationError: what cannot be served, with the figures and the remedy.
    """
    settings = ConnectorSettings.from_extra_config(transfer.kv_connector_extra_config)
    settings.core()
    if vllm_config is None:
        return settings
    versions.refuse_unsupported(vllm_config)
    refuse_log(settings, vllm_config)
    block_size = _block_size(vllm_config)
    if block_size is not None:
        settings.sizes(block_size)
    if _is_here(vllm_config):
        refuse_beyond_machine(settings, vllm_config.parallel_config.world_size)
    return settings


def refuse_beyond_machine(settings: ConnectorSettings, num_ranks: int) -> None:
    """Of ranks that are all here. What the machine has is asked for: what is free may be more until it is needed.

    Raises:
        ConfigurationError: more `host_bytes` than that.
    """
    most = most_memory()
    if most is not None:
        memory = HostMemory(most, "what the machine has, or its control groups allow")
        settings.filled_in().refuse_beyond_memory(memory, num_pools=num_ranks, num_local_pools=num_ranks)


def refuse_log(settings: LogSettings, vllm_config: VllmConfig | None, *, by_workers: bool = False) -> None:
    """Of a connector or a recorder whose log would be written on this machine; `by_workers`: one of each worker, too.

    Raises:
        ConfigurationError: `log_dir` cannot be written, or `max_log_bytes` is too small for the logs of all engines.
    """
    if vllm_config is not None and _is_here(vllm_config):
        num_workers = vllm_config.parallel_config.world_size if by_workers else 0
        settings.refuse_few_segments(versions.num_local_engines(vllm_config) * (1 + num_workers))
        settings.refuse_log_dir()


def _is_here(vllm_config: VllmConfig) -> bool:
    """Whether the engine will be on this machine, with all its ranks: no other one's disk and memory can be asked."""
    parallel = vllm_config.parallel_config
    is_elsewhere = parallel.data_parallel_backend == "ray" or parallel.data_parallel_size_local < 1
    return versions.is_one_machine(vllm_config) and not is_elsewhere


def _block_size(vllm_config: VllmConfig) -> int | None:
    """Tokens of a block; None where vLLM may settle it later.

    A worker does so for its kernels where the operator does not, but on CPU, and for states and pages of unequal sizes
    whatever the operator says (`platforms/interface.py`, update_block_size_for_backend; `v1/core/kv_cache_utils.py`,
    unify_kv_cache_spec_page_size, 0.32).
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    is_settled = cache.user_specified_block_size or vllm_config.device_config.device_type == "cpu"
    if model is None or not is_settled or model.is_hybrid or cache.kv_cache_dtype_skip_layers:
        return None
    kinds = set(getattr(model.hf_text_config, "layer_types", None) or ())
    return None if len(kinds) > 1 else int(cache.block_size)
