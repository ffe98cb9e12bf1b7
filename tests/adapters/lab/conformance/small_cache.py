"""A connector that is right, and small, and makes one mistake where its configuration names one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

BLOCK = 16


@attrs.frozen(slots=False)
class Work(KVConnectorMetadata):
    """(request id, keys, blocks) of the loads and saves that begin in a step."""

    loads: tuple[tuple[str, tuple[bytes, ...], tuple[int, ...]], ...] = ()
    saves: tuple[tuple[str, tuple[bytes, ...], tuple[int, ...]], ...] = ()


class SmallCache(KVConnectorBase_V1):
    """Keeps whole blocks of requests that have ended. Options: `is_async`: loads come asynchronously; `mistake`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options: Mapping[str, Any] = self._kv_transfer_config.kv_connector_extra_config
        self._mistake: str = options.get("mistake", "")
        self._is_async: bool = options.get("is_async", False)
        self._stored: set[bytes] = set()
        self._answers: dict[str, tuple[int, int]] = {}
        self._asked: set[tuple[str, int]] = set()
        self._loads: list[Any] = []
        self._saves: list[Any] = []
        self._saving: dict[str, tuple[bytes, ...]] = {}
        self._pages: dict[bytes, list[torch.Tensor]] = {}
        self._received: list[str] = []
        self._sent: list[str] = []
        self._failed_block_ids: set[int] = set()
        self._held: list[Any] = []
        self._num_empty_steps = 0
        self._pool: Any = None

    # --- scheduler ------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Look at nothing."""
        self._pool = gpu_block_pool
        if self._mistake == "keeps a block for ever":
            gpu_block_pool.touch([gpu_block_pool.blocks[5]])

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Whole blocks, and a token to compute."""
        num_hit = 0
        for key in request.block_hashes:
            if key not in self._stored:
                break
            num_hit += BLOCK
        most = request.num_tokens if self._mistake == "leaves no token" else request.num_tokens - 1
        num_tokens = min(num_hit, most // BLOCK * BLOCK) - num_computed_tokens
        if self._mistake != "counts below zero":
            num_tokens = max(0, num_tokens)
        asked = (request.request_id, request.num_tokens)
        if self._mistake == "answers once" and asked in self._asked:
            num_tokens = 0
        self._asked.add(asked)
        self._answers[request.request_id] = (num_computed_tokens, num_tokens)
        return num_tokens, self._is_async and num_tokens > 0

    def get_external_cache_hit_sources(self, _request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """All from the host."""
        counted = 1 if self._mistake == "counts sources wrongly" else num_external_tokens
        return {CacheHitSource.HOST: counted} if num_external_tokens else {}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load what was taken up."""
        first, _ = self._answers.get(request.request_id, (0, 0))
        if num_external_tokens:
            span = slice(first // BLOCK, (first + num_external_tokens) // BLOCK)
            keys, block_ids = tuple(request.block_hashes[span]), tuple(blocks.get_block_ids()[0][span])
            self._loads.append((request.request_id, keys, block_ids))

    def build_connector_meta(self, scheduler_output: Any) -> Work:
        """Hand over what has begun."""
        if self._mistake == "writes into the output":
            scheduler_output.free_encoder_mm_hashes.append("mine")
        self._num_empty_steps = 0 if scheduler_output.num_scheduled_tokens else self._num_empty_steps + 1
        if self._num_empty_steps > 3:  # with "sleeps on blocks" alone any are held
            self._pool.free_blocks(self._held)
            self._held = []
        work = Work(tuple(self._loads), tuple(self._saves))
        self._loads, self._saves = [], []
        return work

    def update_connector_output(self, connector_output: Any) -> None:
        """What was saved can be loaded."""
        if connector_output.invalid_block_ids:
            self._stored.clear()
        for request_id in connector_output.finished_sending or ():
            self._stored.update(self._saving.pop(request_id, ()))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Keep the blocks until they are saved."""
        if self._mistake == "wants blocks" and not block_ids:
            message = "a request without blocks"
            raise IndexError(message)
        if self._mistake == "sleeps on blocks":
            self._held += (held := [self._pool.blocks[block_id] for block_id in block_ids])
            self._pool.touch(held)
        num_settled = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens - 1)
        number = min(num_settled // BLOCK, len(block_ids), len(request.block_hashes))
        keys = tuple(request.block_hashes[: max(0, number)])
        if all(key in self._stored for key in keys):
            return False, None
        self._saving[request.request_id] = keys
        self._saves.append((request.request_id, keys, tuple(block_ids[:number])))
        return True, None

    def has_pending_push_work(self) -> bool:
        """All is done when it is asked."""
        return self._mistake == "never rests"

    def reset_cache(self) -> bool:
        """Forget, also what is on its way."""
        if self._mistake != "forgets nothing":
            self._stored.clear()
            self._saving = dict.fromkeys(self._saving, ())
        return True

    # --- worker -----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn the layers."""
        self._layers = list(kv_caches.values())

    def start_load_kv(self, _forward_context: Any, **_named: Any) -> None:
        """Fill the blocks at once; it is reported in this step."""
        for request_id, keys, block_ids in self._work().loads:
            places = block_ids[::-1] if self._mistake == "loads in another order" else block_ids
            for key, block in zip(keys, places, strict=True):
                if key not in self._pages and not self._mistake.startswith("hides what failed"):
                    self._failed_block_ids.add(block)
                for layer, page in zip(self._layers, self._pages.get(key, ()), strict=key in self._pages):
                    layer[block] = page
            if self._is_async:
                self._received.append(request_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """It is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing yet."""

    def wait_for_save(self) -> None:
        """Save what ended."""
        for request_id, keys, block_ids in self._work().saves:
            for key, block in zip(keys, block_ids, strict=True):
                self._pages[key] = [layer[block].clone() for layer in self._layers]
            self._sent.append(request_id)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """What has ended since the last call."""
        sent, received = set(self._sent), set(self._received)
        self._sent, self._received = [], []
        if self._mistake == "tells of everybody":
            sent |= finished_req_ids
        if self._mistake == "never lets go":
            sent = set()
        if self._mistake == "tells of a load twice":
            self._received = [] if getattr(self, "_told", False) else list(received)
            self._told = bool(received)
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """What was not there any more."""
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def shutdown(self) -> None:
        """Nothing to close."""
        if self._mistake == "raises at the end":
            message = "not closed"
            raise RuntimeError(message)

    def _work(self) -> Work:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Work)
        return metadata


def lose(_scheduler: SmallCache, worker: SmallCache) -> None:
    """What its worker holds."""
    worker._pages.clear()


class NoWorkerHere(SmallCache):
    """Loads asynchronously, and wants a device."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        if role is KVConnectorRole.WORKER:
            message = "no device"
            raise RuntimeError(message)
        super().__init__(vllm_config, role, kv_cache_config)
        self._is_async = True


class Leaves(SmallCache):
    """Ends its process where its option `leaves` says."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._leaves: str = self._kv_transfer_config.kv_connector_extra_config["leaves"]
        self._leave("__init__")

    def _leave(self, hook: str) -> None:
        if hook == self._leaves:
            raise SystemExit(0)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Or leave."""
        self._leave("get_num_new_matched_tokens")
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def start_load_kv(self, *arguments: Any, **options: Any) -> None:
        """Or leave."""
        self._leave("start_load_kv")
        super().start_load_kv(*arguments, **options)

    def shutdown(self) -> None:
        """Or leave."""
        self._leave("shutdown")
        super().shutdown()
