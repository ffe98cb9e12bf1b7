"""Who is in the engine: kvledger, nobody, any other connector; alone, recorded, or several of them."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

LEDGER = {
    "kv_connector": "KVLedgerConnector",
    "kv_connector_module_path": "kvledger.adapters.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


@attrs.frozen
class Contender:
    """kvledger, with a configuration of its own and a worker that needs nothing done to it."""

    name: str = "KVLedgerConnector"

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any] | None:
        """The `kv_transfer_config` for a world drawn for kvledger with `extra_config`."""
        return {**LEDGER, **kv_transfer, "kv_connector_extra_config": extra_config}

    def make_worker(self, connector_class: Any, config: Any, kv_cache_config: Any) -> KVConnectorBase_V1:
        """The worker side, as vLLM makes it."""
        worker: KVConnectorBase_V1 = connector_class(config, KVConnectorRole.WORKER, kv_cache_config)
        return worker

    def prepared(self, worker: KVConnectorBase_V1) -> KVConnectorBase_V1:
        """The same, before the KV caches are registered."""
        return worker


@attrs.frozen
class NoConnector(Contender):
    """vLLM alone: what a preemption loses and the prefix cache does not keep is computed again."""

    name: str = "no connector"

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> None:  # noqa: ARG002
        """No connector, no configuration."""
        return


@attrs.frozen
class Offloading(Contender):
    """OffloadingConnector with as much host memory as kvledger, saving outputs as well as prompts.

    Its scheduler side and its worker are vLLM's. Only the last call of its worker, the copy itself, wants a CUDA
    device; `TensorCopies` stands in for it and copies the same bytes between CPU tensors, done when it returns.
    """

    name: str = "OffloadingConnector"

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:
        """Its unit is the block. It rounds a block up to a page of memory, so it gets such a page for each slot."""
        from kvledger.adapters.simulation.engine import BLOCK_SIZE, block_bytes

        num_slots = extra_config["host_bytes"] // block_bytes(BLOCK_SIZE)
        extra = {"cpu_bytes_to_use": num_slots * mmap.PAGESIZE, "offload_prompt_only": False}
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            **kv_transfer,
            "kv_connector_extra_config": extra,
        }

    def prepared(self, worker: KVConnectorBase_V1) -> KVConnectorBase_V1:
        """Let the copies happen on CPU tensors."""
        side: Any = worker
        spec = side.connector_worker.spec
        spec.get_worker = lambda kv_caches: TensorCopies(kv_caches, spec.num_chunks)
        return worker


class TensorCopies(OffloadingWorker):
    """Copies pages between KV tensors and host tensors of one block each; every job is done at once."""

    def __init__(self, kv_caches: CanonicalKVCaches, num_chunks: int) -> None:
        self._device = [tensor.tensor for tensor in kv_caches.tensors]
        self._host = [torch.zeros(num_chunks, tensor.shape[1], dtype=tensor.dtype) for tensor in self._device]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Copy blocks to host pages."""
        return self._copy(job_id, self._device, src_spec, self._host, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy host pages to blocks."""
        return self._copy(job_id, self._host, src_spec, self._device, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        """The jobs since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for."""

    def _copy(
        self, job_id: int, sources: list[torch.Tensor], source: Any, destinations: list[torch.Tensor], destination: Any
    ) -> bool:
        for source_tensor, destination_tensor in zip(sources, destinations, strict=True):
            pages = source_tensor[torch.as_tensor(source.block_ids, dtype=torch.long)]
            destination_tensor[torch.as_tensor(destination.block_ids, dtype=torch.long)] = pages
        self._finished.append(TransferResult(job_id=job_id, success=True))
        return True


@attrs.frozen
class NamedConnector(Contender):
    """Any connector, by its module, with options that no world decides."""

    name: str = attrs.field(kw_only=True)
    module: str | None = None
    options: Mapping[str, Any] = {}

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Its own configuration."""
        return {
            "kv_connector": self.name,
            "kv_connector_module_path": self.module,
            "kv_role": "kv_both",
            **kv_transfer,
            "kv_connector_extra_config": dict(self.options),
        }


@attrs.frozen
class Several(Contender):
    """Contenders in a `MultiConnector`."""

    name: str = "MultiConnector"
    children: tuple[Contender, ...] = attrs.field(kw_only=True)

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:
        """Each as it would be alone."""
        connectors = [child.kv_transfer(extra_config, {}) for child in self.children]
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            **kv_transfer,
            "kv_connector_extra_config": {"connectors": connectors},
        }

    def prepared(self, worker: KVConnectorBase_V1) -> KVConnectorBase_V1:
        """Each child as it would be alone."""
        side: Any = worker
        for child, connector in zip(self.children, side._connectors, strict=True):
            child.prepared(connector)
        return worker


@attrs.frozen
class Recorded(Contender):
    """The same connector with the same configuration, recorded."""

    inner: Contender = attrs.field(kw_only=True)
    name: str = "KVLedgerRecorderHMA"

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:
        """Around what the other contender would be configured with."""
        inner = self.inner.kv_transfer(extra_config, {})
        return {
            "kv_connector": self.name,
            "kv_connector_module_path": "kvledger.adapters.recorder",
            "kv_role": "kv_both",
            **kv_transfer,
            "kv_connector_extra_config": {
                "log_dir": extra_config.get("log_dir"),
                "digests": extra_config.get("digests", "off"),
                "connector": inner,
            },
        }

    def prepared(self, worker: KVConnectorBase_V1) -> KVConnectorBase_V1:
        """What the other needs is done to the other."""
        side: Any = worker
        self.inner.prepared(side.wrapped)
        return worker


LEDGER_CONTENDER = Contender()
