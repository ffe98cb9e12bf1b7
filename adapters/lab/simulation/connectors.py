"""Sets up connectors for the simulated engine: their configuration, and workers that run on a CPU.

vLLM's own connectors run unchanged, except for the call with which their workers copy. This call needs a CUDA device,
so it is replaced: the same bytes are copied between CPU tensors, at once or after several queries of the connector.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final
from unittest import mock

import attrs
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.simple_kv_offload import worker as simple_worker

from kvledger.adapters.lab.simulation.hashed_model import BLOCK_SIZE, block_bytes

KVLEDGER_TRANSFER: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "kv_connector": "KVLedgerConnector",
        "kv_connector_module_path": "kvledger.adapters.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
)


@attrs.frozen
class ConnectorSetup:
    """Setup of a connector. This base class sets up kvledger, whose worker runs on a CPU without changes."""

    name: str = "KVLedgerConnector"

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any] | None:
        """Return the `kv_transfer_config` of a world. `extra_config` has kvledger's settings in this world.

        By default, kvledger offers every load, because the simulated clock does not show how long computing takes. It
        saves each chunk when the chunk's tokens are settled, because simulated requests are shorter than the usual save
        interval.
        """
        extra_config = {"offer": "always", "save_interval_tokens": 0, **extra_config}
        return {**KVLEDGER_TRANSFER, **kv_transfer, "kv_connector_extra_config": extra_config}

    def make_worker(self, connector_class: Any, config: Any, kv_cache_config: Any) -> KVConnectorBase_V1:
        """Create the worker side, as vLLM does."""
        worker: KVConnectorBase_V1 = connector_class(config, KVConnectorRole.WORKER, kv_cache_config)
        return worker

    def prepared(self, worker: KVConnectorBase_V1) -> KVConnectorBase_V1:
        """Prepare the worker before the KV caches are registered."""
        return worker


KVLEDGER = ConnectorSetup()


def other_transfer(name: str, kv_transfer: Mapping[str, Any], extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `kv_transfer_config` of a connector other than kvledger."""
    return {"kv_connector": name, "kv_role": "kv_both", **kv_transfer, "kv_connector_extra_config": dict(extra_config)}


class _Copy:
    """A copy that moves its bytes after `num_questions` queries, or as soon as something waits for the copy."""

    def __init__(self, move: Callable[[], None], num_questions: int) -> None:
        self._move: Callable[[], None] | None = move
        self._num_questions = num_questions
        if not num_questions:
            self.synchronize()

    def query(self) -> bool:
        """Whether the copy is done, like the query of a CUDA event."""
        if self._move is not None:
            self._num_questions -= 1
            if self._num_questions < 0:
                self.synchronize()
        return self._move is None

    def synchronize(self) -> None:
        """Move the bytes now, if they have not been moved yet."""
        move, self._move = self._move, None
        if move is not None:
            move()


@attrs.frozen
class Offloading(ConnectorSetup):
    """vLLM's OffloadingConnector, with host memory for as many blocks as kvledger. It also saves the KV of outputs."""

    name: str = "OffloadingConnector"
    num_questions: int = 0
    """Number of queries after which a copy is done; 0: a copy is done at once."""

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:
        """Return the connector's configuration. It gives the connector one memory page for each slot of kvledger.

        The connector saves blocks, and each block takes a whole memory page.
        """
        num_slots = extra_config["host_bytes"] // block_bytes(BLOCK_SIZE)
        extra = {"cpu_bytes_to_use": num_slots * mmap.PAGESIZE, "offload_prompt_only": False}
        return other_transfer(self.name, kv_transfer, extra)

    def prepared(self, worker: KVConnectorBase_V1) -> KVConnectorBase_V1:
        """Let the worker copy between CPU tensors."""
        side: Any = worker
        spec = side.connector_worker.spec
        spec.get_worker = lambda kv_caches: TensorWorker(
            kv_caches, spec.num_chunks, spec.blocks_per_chunk, self.num_questions
        )
        return worker


class TensorWorker(OffloadingWorker):
    """Copies pages between KV tensors and host tensors. In the host tensors, the blocks of a chunk are contiguous."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, num_chunks: int, blocks_per_chunk: int, num_questions: int
    ) -> None:
        self._device = [tensor.tensor for tensor in kv_caches.tensors]
        num_blocks = num_chunks * blocks_per_chunk
        self._host = [torch.zeros(num_blocks, tensor.shape[1], dtype=tensor.dtype) for tensor in self._device]
        self._blocks_per_chunk = blocks_per_chunk
        self._num_questions = num_questions
        self._jobs: dict[int, _Copy] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Copy blocks to host pages."""
        rows = self._rows(dst_spec, src_spec)
        return self._copy(job_id, self._device, src_spec.block_ids, self._host, rows)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy host pages to blocks."""
        rows = self._rows(src_spec, dst_spec)
        return self._copy(job_id, self._host, rows, self._device, dst_spec.block_ids)

    def _rows(self, chunks: Any, blocks: GPULoadStoreSpec) -> list[int]:
        """Return the rows of these blocks in the host tensors. With several groups, a chunk has only one block."""
        first, size = int(blocks.block_indices[0]) % self._blocks_per_chunk, self._blocks_per_chunk
        places = range(first, first + len(blocks.block_ids)) if size > 1 else range(len(blocks.block_ids))
        return [int(chunks.block_ids[place // size]) * size + place % size for place in places]

    def get_finished(self) -> list[TransferResult]:
        """Return the results of the jobs that finished since the last call."""
        finished = [job_id for job_id, copy in self._jobs.items() if copy.query()]
        for job_id in finished:
            del self._jobs[job_id]
        return [TransferResult(job_id=job_id, success=True) for job_id in finished]

    def wait(self, job_ids: set[int]) -> None:
        """Finish these jobs now."""
        for job_id, copy in self._jobs.items():
            if job_id in job_ids:
                copy.synchronize()

    def _copy(
        self,
        job_id: int,
        sources: list[torch.Tensor],
        source_rows: Any,
        destinations: list[torch.Tensor],
        destination_rows: Any,
    ) -> bool:
        def move() -> None:
            for source_tensor, destination_tensor in zip(sources, destinations, strict=True):
                pages = source_tensor[torch.as_tensor(source_rows, dtype=torch.long)]
                destination_tensor[torch.as_tensor(destination_rows, dtype=torch.long)] = pages

        self._jobs[job_id] = _Copy(move, self._num_questions)
        return True


@attrs.frozen
class SimpleCPU(ConnectorSetup):
    """vLLM's SimpleCPUOffloadConnector, with as much host memory as kvledger."""

    name: str = "SimpleCPUOffloadConnector"
    is_lazy: bool = False
    num_questions: int = 0
    """Number of queries after which a copy is done; 0: a copy is done at once."""

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:
        """Return the connector's configuration. The connector saves single blocks, not chunks."""
        extra = {"cpu_bytes_to_use": extra_config["host_bytes"], "lazy_offload": self.is_lazy}
        return other_transfer(self.name, kv_transfer, extra)

    def prepared(self, worker: KVConnectorBase_V1) -> KVConnectorBase_V1:
        """Let the worker copy between CPU tensors.

        If vLLM's prefix cache is off, the connector does nothing and has no handler for copies.
        """
        side: Any = worker
        handler = side.worker_handler
        if handler is None:
            return worker
        register, events = handler.register_kv_caches, mock.Mock()

        def register_on_cpu(kv_caches: dict[str, torch.Tensor]) -> None:
            stream = mock.Mock(priority_range=lambda: (0, 0))
            with (
                mock.patch.object(torch.cuda, "Stream", stream),
                mock.patch.object(simple_worker, "DmaCopyBackend", partial(_TensorBackend, self.num_questions)),
                mock.patch.object(simple_worker, "PIN_MEMORY", new=False),
            ):
                register(kv_caches)

        def wait_for_save() -> None:
            with mock.patch.object(torch.cuda, "current_stream", events):
                type(handler).wait_for_save(handler)

        handler._store_compute_done = events
        handler.register_kv_caches, handler.wait_for_save = register_on_cpu, wait_for_save
        return worker


class _TensorBackend:
    """Replaces `DmaCopyBackend`, and copies between the CPU tensors that `init` gets."""

    def __init__(self, num_questions: int) -> None:
        self._num_questions = num_questions

    def init(self, device: dict[str, torch.Tensor], host: dict[str, torch.Tensor], *_streams: object) -> None:
        self._device, self._host = list(device.values()), list(host.values())

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        **_wait: object,
    ) -> None:
        """Append an object in place of the CUDA event that `DmaCopyBackend` records after the copy."""
        sources, destinations = (self._device, self._host) if is_store else (self._host, self._device)

        def move() -> None:
            for source, destination in zip(sources, destinations, strict=True):
                destination[list(dst_blocks)] = source[list(src_blocks)]

        events_list.append((event_idx, _Copy(move, self._num_questions)))
