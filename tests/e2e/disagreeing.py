"""A connector whose workers are configured otherwise, as on a machine that was forgotten in a roll-out."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvledger.adapters.vllm import KVLedgerConnector


class DisagreeingConnector(KVLedgerConnector):
    """Half the host memory in every worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if role is KVConnectorRole.WORKER:
            vllm_config.kv_transfer_config.kv_connector_extra_config["host_bytes"] = "32MiB"
        super().__init__(vllm_config, role, kv_cache_config)
