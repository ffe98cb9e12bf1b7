"""Of NIXL's connectors the scheduler's side alone: the worker's needs the library and a peer."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector, NixlPushConnector

from sim.witness import PlainWitness


class _WithoutWorker:
    """The scheduler's side; the worker's does nothing here."""

    def __new__(cls, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> Any:
        """Somebody who does nothing in the worker's place."""
        is_worker = role is KVConnectorRole.WORKER
        return PlainWitness(vllm_config, role, kv_cache_config) if is_worker else super().__new__(cls)


class PullWithoutWorker(_WithoutWorker, NixlPullConnector):
    """One engine reads from the other."""


class PushWithoutWorker(_WithoutWorker, NixlPushConnector):
    """One engine writes into the other."""
