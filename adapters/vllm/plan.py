"""Computes what a configuration means for a model: sizes, pools, and whether the model is declined.

The plan is made before anything is allocated. The connector starts with the plan, and `kvledger check` prints the same
plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvledger.adapters.vllm import versions
from kvledger.adapters.vllm.configuration import ConnectorSettings
from kvledger.adapters.vllm.groups import Groups, describe_groups
from kvledger.adapters.vllm.reusable_prefixes import unusable_prefixes
from kvledger.lifecycle import ConfigurationError, LedgerConfiguration, Refusal
from kvledger.storage.kv import available_memory

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@attrs.frozen
class Plan:
    """The settings, sizes and pools with which an engine runs."""

    settings: ConnectorSettings
    """The settings, with the default of `host_bytes` filled in."""
    groups: Groups
    configuration: LedgerConfiguration
    block_bytes: int
    """Bytes of one block on one rank; 0 if the model is declined."""
    num_pools: int
    """Number of pools that `host_bytes` is divided among."""
    num_local_pools: int
    """Number of the pools that are on this machine."""

    @property
    def shares_pool(self) -> bool:
        """Whether all ranks share one pool."""
        return self.num_pools < self.configuration.num_ranks

    def refuse_beyond_memory(self) -> None:
        """Refuse the plan if this machine's pools need more memory than is available now.

        Call this before any pool is allocated.

        Raises:
            ConfigurationError: the pools do not fit. The error names a size that fits.
        """
        if not self.groups.declined:
            self.settings.refuse_beyond_memory(
                available_memory(), num_pools=self.num_pools, num_local_pools=self.num_local_pools
            )


def plan(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: ConnectorSettings) -> Plan:
    """Return the plan. The scheduler's side and each worker get the same plan.

    Raises:
        ConfigurationError: kvledger cannot serve this model with these settings. The error says why, and what to
            change.
    """
    versions.refuse_unsupported(vllm_config)
    groups = describe_groups(vllm_config, kv_cache_config)
    if not groups.declined:
        groups = attrs.evolve(groups, declined=tuple(unusable_prefixes(vllm_config, kv_cache_config)))
    kv_cache_config = versions.as_scheduled(kv_cache_config)
    settings = settings.filled_in(
        num_engines=versions.num_local_engines(vllm_config), is_one_machine=versions.is_one_machine(vllm_config)
    )
    num_ranks = vllm_config.parallel_config.world_size
    if groups.declined:
        return Plan(settings, groups, settings.idle_configuration(), 0, num_ranks, num_ranks)
    shares_pool = settings.share_pool and versions.shares_pool(vllm_config, kv_cache_config)
    num_pools = 1 if shares_pool else num_ranks
    block_bytes = versions.block_bytes(kv_cache_config)
    configuration = settings.ledger_configuration(
        block_size=versions.block_size(kv_cache_config),
        block_bytes=block_bytes,
        num_ranks=num_ranks,
        num_pools=num_pools,
        windows=groups.windows,
        supports_async_saves=versions.supports_async_saves(vllm_config, kv_cache_config),
        needs_async_loads=versions.needs_async_loads(vllm_config),
        has_prefix_cache=bool(vllm_config.cache_config.enable_prefix_caching),
    )
    configuration = attrs.evolve(configuration, settles_in_flight=not versions.uses_speculation(vllm_config))
    if configuration.async_saves and versions.zeroes_new_blocks(kv_cache_config):
        reason = (
            "cannot be used with this model's KV cache of mixed precision: vLLM zeroes new blocks before kvledger "
            "can wait for a copy out of them"
        )
        raise ConfigurationError(Refusal(reason, "write 'sync' or 'auto'", "save_mode", "async"))
    num_local_pools = 1 if shares_pool else versions.num_local_ranks(vllm_config)
    return Plan(settings, groups, configuration, block_bytes, num_pools, num_local_pools)
