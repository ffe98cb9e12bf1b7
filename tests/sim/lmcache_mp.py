"""vLLM's own LMCache connector, unmodified, with a server in this process, so that it can live in a simulated world.

`kv_connector/v1/lmcache_mp_connector.py` of vLLM 0.32 imports the client that the package `lmcache` brought up to 0.4.4
(`lmcache/integration/vllm/vllm_multi_process_adapter.py`); later clients are made with other arguments. That client
wants a server process and CUDA's events. Here client and server are one: they have the names, the calls and the answers
of 0.4.4, and keep chunks of `HashedModel` in memory, least recently used first to go, but for those that a lookup has
locked.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import attrs
import torch

from kvledger.adapters.lab.simulation.connectors import ConnectorSetup

Key = tuple[str, tuple[int, ...]]
"""(salt, all tokens up to the end of a chunk)."""


@attrs.define(slots=False)
class Server:
    """Chunks in memory, and who has locked which."""

    num_chunks: int
    num_polls: int
    """How often a lookup is answered that it is not known yet."""
    chunk_size: int
    rng: random.Random
    failure_share: float
    """Of the retrieves: they fill a part of their blocks with nonsense, and say so of all."""
    chunks: OrderedDict[Key, list[torch.Tensor]] = attrs.field(factory=OrderedDict)
    locked: dict[str, list[Key]] = attrs.field(factory=dict)

    def keys(self, salt: str, tokens: Sequence[int], start: int, end: int) -> Iterator[Key]:
        """Of the chunks whose ends lie behind `start` and up to `end`."""
        for chunk_end in range(start + self.chunk_size, end + 1, self.chunk_size):
            yield salt, tuple(tokens[:chunk_end])

    def look_up(self, request_id: str, salt: str, tokens: Sequence[int]) -> int:
        """How many tokens it has from the first on; their chunks stay until the request lets go of them."""
        found = list(itertools.takewhile(self.chunks.__contains__, self.keys(salt, tokens, 0, len(tokens))))
        self.locked[request_id] = found
        return len(found) * self.chunk_size

    def put(self, key: Key, pages: list[torch.Tensor]) -> None:
        """Keep a chunk, if there is place for it."""
        kept = {locked for keys in self.locked.values() for locked in keys}
        self.chunks.pop(key, None)
        while len(self.chunks) >= self.num_chunks:
            victim = next((other for other in self.chunks if other not in kept), None)
            if victim is None:
                return
            del self.chunks[victim]
        self.chunks[key] = pages


SERVERS: dict[str, Server] = {}
"""By address, until a worker has said that it is going."""


@attrs.frozen
class LoadStoreOp:
    """As the client's own."""

    token_ids: list[int]
    block_ids: list[int]
    start: int = 0
    end: int = 0
    skip_first_n_tokens: int = 0

    def __len__(self) -> int:
        return len(self.block_ids)


@attrs.frozen
class RequestAllocationRecord:
    """As the client's own."""

    req_id: str
    new_block_ids: list[int]
    new_token_ids: list[int]


class SchedulerAdapter:
    """What the scheduler's side asks the server."""

    def __init__(self, *, server_url: str, vllm_block_size: int, **_options: Any) -> None:
        self._server = SERVERS[server_url]
        self._blocks_per_chunk = self._server.chunk_size // vllm_block_size
        self._polls: dict[str, int] = {}
        self._found: dict[str, int] = {}

    def maybe_submit_lookup_request(self, request_id: str, token_ids: list[int], cache_salt: str = "") -> None:
        """Once until the result is cleaned up."""
        if request_id not in self._found:
            self._found[request_id] = self._server.look_up(request_id, cache_salt, token_ids)

    def check_lookup_result(self, request_id: str) -> int | None:
        """Tokens; None for the first few times."""
        self._polls[request_id] = self._polls.get(request_id, 0) + 1
        return self._found[request_id] if self._polls[request_id] > self._server.num_polls else None

    def num_blocks_per_chunk(self) -> int:
        """As it says."""
        return self._blocks_per_chunk

    def cleanup_lookup_result(self, request_id: str) -> None:
        """The next lookup of the request is another one."""
        self._found.pop(request_id, None)
        self._polls.pop(request_id, None)

    def free_lookup_locks(self, token_ids: list[int], start: int, end: int, request_id: str) -> None:  # noqa: ARG002
        """They are not going to be retrieved."""
        self._server.locked[request_id] = self._server.locked.get(request_id, [])[end // self._server.chunk_size :]

    def end_session(self, request_id: str) -> None:
        """The request is over."""
        self._server.locked.pop(request_id, None)

    def report_block_allocations(self, records: list[RequestAllocationRecord]) -> None:
        """For its statistics."""


class WorkerAdapter:
    """Copies between KV tensors and the server; what is submitted is done at once and told in the next answer."""

    use_mla = False

    def __init__(self, *, server_url: str, vllm_block_size: int, **_options: Any) -> None:
        self._server, self._url = SERVERS[server_url], server_url
        self._blocks_per_chunk = self._server.chunk_size // vllm_block_size
        self._block_size = vllm_block_size
        self._kv_caches: list[torch.Tensor] = []
        self._retrieved: set[str] = set()
        self._returned: set[str] = set()
        self._failed_block_ids: set[int] = set()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Of all layers."""
        self._kv_caches = list(kv_caches.values())

    def _chunks(self, op: LoadStoreOp, salt: str) -> Iterator[tuple[Key, list[int]]]:
        for number, key in enumerate(self._server.keys(salt, op.token_ids, op.start, op.end)):
            yield key, op.block_ids[number * self._blocks_per_chunk : (number + 1) * self._blocks_per_chunk]

    def batched_submit_store_requests(
        self, _request_ids: list[str], ops: list[LoadStoreOp], _event: object, *, cache_salts: list[str]
    ) -> None:
        """Copy blocks to the server."""
        for op, salt in zip(ops, cache_salts, strict=True):
            for key, block_ids in self._chunks(op, salt):
                self._server.put(key, [tensor[block_ids].clone() for tensor in self._kv_caches])

    def batched_submit_retrieve_requests(
        self, request_ids: list[str], ops: list[LoadStoreOp], _event: object, *, cache_salts: list[str]
    ) -> None:
        """Copy chunks to blocks, but for those at the beginning that are shared with others."""
        for request_id, op, salt in zip(request_ids, ops, cache_salts, strict=True):
            left_out = set(op.block_ids[: op.skip_first_n_tokens // self._block_size])
            for key, block_ids in self._chunks(op, salt):
                self._server.chunks.move_to_end(key)
                written = [place for place, block_id in enumerate(block_ids) if block_id not in left_out]
                for tensor, pages in zip(self._kv_caches, self._server.chunks[key], strict=True):
                    tensor[[block_ids[place] for place in written]] = pages[written]
            self._server.locked.pop(request_id, None)
            self._retrieved.add(request_id)
            if self._server.rng.random() < self._server.failure_share:
                failed = [block_id for block_id in op.block_ids if block_id not in left_out]
                for tensor in self._kv_caches:
                    tensor[failed[self._server.rng.randrange(len(failed)) :]] = -1
                self._failed_block_ids.update(op.block_ids)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Everybody who has ended, once for each id; and who was retrieved."""
        sent = finished_req_ids - self._returned
        self._returned |= sent
        retrieved, self._retrieved = self._retrieved, set()
        return sent, retrieved

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Of the retrieves that failed since the last call, all of them, as the client says it."""
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def shutdown(self) -> None:
        """Nobody comes back to this server."""
        SERVERS.pop(self._url, None)


def _package() -> dict[str, ModuleType]:
    """What the connector imports of the package `lmcache`."""
    contents: dict[str, dict[str, Any]] = {
        "lmcache": {},
        "lmcache.utils": {"init_logger": logging.getLogger},
        "lmcache.integration": {},
        "lmcache.integration.vllm": {},
        "lmcache.integration.vllm.utils": {"mla_enabled": lambda _model_config: False},
        "lmcache.integration.vllm.vllm_multi_process_adapter": {
            "LMCacheMPSchedulerAdapter": SchedulerAdapter,
            "LMCacheMPWorkerAdapter": WorkerAdapter,
            "LoadStoreOp": LoadStoreOp,
            "ParallelStrategy": lambda *strategy: strategy,
        },
        "lmcache.v1": {},
        "lmcache.v1.multiprocess": {},
        "lmcache.v1.multiprocess.custom_types": {"RequestAllocationRecord": RequestAllocationRecord},
    }
    modules = {}
    for name, content in contents.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(content)
    return modules


def import_connector() -> None:
    """Import vLLM's module with this client in the place of LMCache's, and without CUDA's streams and events."""
    name = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector"
    if name in sys.modules:
        return
    package = _package()
    sys.modules.update(package)
    try:
        module: Any = importlib.import_module(name)
    finally:
        for each in package:
            del sys.modules[each]
    event = SimpleNamespace(record=lambda: None)
    module.torch = SimpleNamespace(
        Tensor=torch.Tensor,
        cuda=SimpleNamespace(
            stream=lambda _stream: contextlib.nullcontext(),
            current_stream=lambda: None,
            Event=lambda **_options: event,
        ),
    )


_NUMBERS = itertools.count()


@attrs.frozen
class LMCacheMP(ConnectorSetup):
    """`LMCacheMPConnector` as vLLM 0.32 has it, each engine with a server of its own."""

    name: str = "LMCacheMPConnector"
    num_chunks: int = 1000
    num_polls: int = 0
    chunk_size: int = 32
    """Tokens."""
    failure_share: float = 0.0

    def kv_transfer(self, extra_config: dict[str, Any], kv_transfer: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """The address of a new server."""
        import_connector()
        host, port = f"here://{next(_NUMBERS)}", 1
        SERVERS[f"{host}:{port}"] = Server(
            self.num_chunks, self.num_polls, self.chunk_size, random.Random(1), self.failure_share
        )
        return {
            "kv_connector": self.name,
            "kv_role": "kv_both",
            **kv_transfer,
            "kv_connector_extra_config": {"lmcache.mp.host": host, "lmcache.mp.port": port},
        }
