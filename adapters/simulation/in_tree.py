"""More of vLLM's own connectors in the places of kvledger, unmodified but for what a CPU cannot do.

SimpleCPUOffloadConnector: its scheduler side and the book-keeping of its worker are vLLM's; its copies run on CUDA
streams, in whose place `LateCopies` copies the same bytes between CPU tensors, some questions later. ExampleConnector
is whole.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from functools import partial
from typing import Any
from unittest import mock

import attrs
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_offload.base import TransferResult
from vllm.v1.simple_kv_offload import worker as simple_worker

from kvledger.adapters.simulation.contenders import Contender, Offloading, TensorCopies


class LateCopies:
    """A copy backend that moves no byte until it has been asked so often whether it is done, or is waited for."""

    def __init__(self, num_questions: int) -> None:
        self._num_questions = num_questions

    def init(self, device: dict[str, torch.Tensor], host: dict[str, torch.Tensor], *_streams: object) -> None:
        """Between these tensors."""
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
        """As `DmaCopyBackend` does, which appends the event when the copy is on its stream."""
        sources, destinations = (self._device, self._host) if is_store else (self._host, self._device)

        def move() -> None:
            for source, destination in zip(sources, destinations, strict=True):
                destination[list(dst_blocks)] = source[list(src_blocks)]

        events_list.append((event_idx, _Event(move, self._num_questions)))


class _Event:
    """What the worker asks, or waits for."""

    def __init__(self, move: Any, num_questions: int) -> None:
        self._move = move
        self._num_questions = num_questions
        if not num_questions:
            self.synchronize()

    def query(self) -> bool:
        if self._move is not None:
            self._num_questions -= 1
            if self._num_questions < 0:
                self.synchronize()
        return self._move is None

    def synchronize(self) -> None:
        if self._move is not None:
            self._move()
            self._move = None


@attrs.frozen
class SimpleCPU(Contender):
    """SimpleCPUOffloadConnector with as much host memory as kvledger."""

    name: str = "SimpleCPUOffloadConnector"
    is_lazy: bool = False
    num_questions: int = 0
    """After how many a copy is done; 0: at once."""

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:
        """Its unit is the block."""
        extra = {"cpu_bytes_to_use": extra_config["host_bytes"], "lazy_offload": self.is_lazy}
        return {
            "kv_connector": "SimpleCPUOffloadConnector",
            "kv_role": "kv_both",
            **kv_transfer,
            "kv_connector_extra_config": extra,
        }

    def prepared(self, worker: KVConnectorBase_V1) -> KVConnectorBase_V1:
        """Let the copies happen on CPU tensors. Without a prefix cache the connector does nothing and has no worker."""
        side: Any = worker
        handler = side.worker_handler
        if handler is None:
            return worker
        register, events = handler.register_kv_caches, mock.Mock()

        def register_on_cpu(kv_caches: dict[str, torch.Tensor]) -> None:
            stream = mock.Mock(priority_range=lambda: (0, 0))
            with (
                mock.patch.object(torch.cuda, "Stream", stream),
                mock.patch.object(simple_worker, "DmaCopyBackend", partial(LateCopies, self.num_questions)),
                mock.patch.object(simple_worker, "PIN_MEMORY", new=False),
            ):
                register(kv_caches)

        def wait_for_save() -> None:
            with mock.patch.object(torch.cuda, "current_stream", events):
                type(handler).wait_for_save(handler)

        handler._store_compute_done = events
        handler.register_kv_caches, handler.wait_for_save = register_on_cpu, wait_for_save
        return worker


@attrs.frozen
class Example(Contender):
    """ExampleConnector, which keeps prompts in files."""

    name: str = "ExampleConnector"
    _directories: list[tempfile.TemporaryDirectory[str]] = attrs.field(factory=list, eq=False, repr=False)
    """One for each engine; gone with the contender."""

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """With a directory of its own."""
        self._directories.append(tempfile.TemporaryDirectory())
        return {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            **kv_transfer,
            "kv_connector_extra_config": {"shared_storage_path": self._directories[-1].name},
        }


@attrs.frozen
class LateOffloading(Offloading):
    """OffloadingConnector whose copies take some questions, those of one direction one after the other."""

    num_questions: int = 2

    def prepared(self, worker: KVConnectorBase_V1) -> KVConnectorBase_V1:
        """Let the copies happen on CPU tensors."""
        side: Any = worker
        spec = side.connector_worker.spec
        spec.get_worker = lambda kv_caches: _LateTensorCopies(kv_caches, spec.num_chunks, self.num_questions)
        return worker


class _LateTensorCopies(TensorCopies):
    """Each copy is made when it is done: what it reads, it reads then."""

    def __init__(self, kv_caches: Any, num_chunks: int, num_questions: int) -> None:
        super().__init__(kv_caches, num_chunks)
        self._num_questions = num_questions
        self._late: list[list[Any]] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Not yet."""
        self._late.append([self._num_questions, job_id, super().submit_store, src_spec, dst_spec])
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Not yet."""
        self._late.append([self._num_questions, job_id, super().submit_load, src_spec, dst_spec])
        return True

    def get_finished(self) -> list[TransferResult]:
        """Those whose time has come."""
        for entry in self._late:
            entry[0] -= 1
        self._finish(entry for entry in self._late if entry[0] < 0)
        return super().get_finished()

    def wait(self, job_ids: set[int]) -> None:
        """Until these are done."""
        self._finish(entry for entry in self._late if entry[1] in job_ids)

    def _finish(self, entries: Iterable[list[Any]]) -> None:
        for entry in list(entries):
            _, job_id, submit, source, destination = entry
            submit(job_id, source, destination)
            self._late.remove(entry)
