"""Another cache in a `MultiConnector`: it has everything, and fills whatever blocks it is chosen for, or fails to.

A minimal connector of the tests' own, because a real one has no way to be told when to fail. It knows vLLM's hooks and
what `HashedModel` would have written, nothing of kvledger.
"""

from __future__ import annotations

import random
from typing import Any

import attrs
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvledger.adapters.lab.simulation.expected import chained_hash
from kvledger.adapters.lab.simulation.hashed_model import marks


@attrs.frozen(slots=False)
class Fill(KVConnectorMetadata):
    """(request id, its tokens, its blocks, first token, end) of every load that begins in a step."""

    loads: tuple[tuple[str, tuple[int, ...], tuple[int, ...], int, int], ...] = ()


class Neighbour(KVConnectorBase_V1, SupportsHMA):
    """Has the first `num_tokens` of every request whose id begins with "theirs".

    Options: `num_steps`: that a load takes asynchronously, 0 within one; `num_failures`: the first loads that fail;
    `failure_share` and `seed`: of the loads that fail, in part or, asynchronously, as a whole.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = self._kv_transfer_config.kv_connector_extra_config
        self._num_tokens: int = options["num_tokens"]
        self._num_steps: int = options.get("num_steps", 0)
        self._num_failures: int = options.get("num_failures", 0)
        self._failure_share: float = options.get("failure_share", 0.0)
        self._rng = random.Random(options.get("seed"))
        self._block_size: int = vllm_config.cache_config.block_size
        self._served: set[tuple[str, int]] = set()
        self._pending: list[Any] = []
        self._coming: list[list[Any]] = []
        self._failed_block_ids: set[int] = set()
        self._failed_requests: set[str] = set()
        self._kv_caches: dict[str, torch.Tensor] = {}
        self.weights = 0
        """Of the model: where every hash begins."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """The hit beyond what is computed."""
        # Once a life is enough. Offered again after it failed, an asynchronous load may have to wait for blocks that
        # requests behind it in the queue hold, which wait for it: 0.32 never schedules anybody then
        # (`v1/core/sched/scheduler.py`, kv_holding_waiting and _inflight_prefill_reserved_blocks).
        was_served = (request.request_id, request.num_preemptions) in self._served
        if was_served or not request.request_id.startswith("theirs"):
            return 0, False
        num_tokens = min(self._num_tokens, request.num_tokens - 1) - num_computed_tokens
        return max(0, num_tokens), num_tokens > 0 and self._num_steps > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load what was taken up."""
        if num_external_tokens:
            end = min(self._num_tokens, request.num_tokens - 1)
            tokens = tuple(request.all_token_ids[:end])
            table = tuple(blocks.get_block_ids()[0])
            self._served.add((request.request_id, request.num_preemptions))
            self._pending.append((request.request_id, tokens, table, end - num_external_tokens, end))

    def build_connector_meta(self, scheduler_output: Any) -> Fill:  # noqa: ARG002 -- vLLM's signature
        """Hand the loads over."""
        loads, self._pending = tuple(self._pending), []
        return Fill(loads)

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: Any,  # noqa: ARG002 -- vLLM's signature
    ) -> tuple[bool, None]:
        """It saves nothing, so no blocks are kept for it."""
        self._served -= {entry for entry in self._served if entry[0] == request.request_id}
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn the tensors of the hashed model."""
        self._kv_caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Fill the blocks, now or in a later step."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Fill)
        for load in metadata.loads:
            if self._num_steps:
                self._coming.append([self._num_steps, load])
            else:
                self._fill(load)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Tell what has come, and what has not."""
        for entry in self._coming:
            entry[0] -= 1
        done = [load for steps, load in self._coming if steps < 0]
        self._coming = [entry for entry in self._coming if entry[0] >= 0]
        for load in done:
            self._fill(load)
        failed, self._failed_requests = self._failed_requests, set()
        return KVConnectorTransferResults(finished_recving={load[0] for load in done}, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that hold nonsense."""
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def has_pending_push_work(self) -> bool:
        """Nothing is ever pushed."""
        return False

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done when they begin."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """It has everything already."""

    def wait_for_save(self) -> None:
        """It has everything already."""

    def _fill(self, load: tuple[str, tuple[int, ...], tuple[int, ...], int, int]) -> None:
        request_id, tokens, table, first, end = load
        state = self.weights
        for position in range(end):
            state = chained_hash(state, tokens[position])
            if position >= first:
                block, offset = table[position // self._block_size], position % self._block_size
                for number, tensor in enumerate(self._kv_caches.values()):
                    tensor[block, :, offset] = state + marks(number, tensor)
        self._perhaps_fail(request_id, list(table[first // self._block_size : -(-end // self._block_size)]))

    def _perhaps_fail(self, request_id: str, block_ids: list[int]) -> None:
        if self._num_failures:
            self._num_failures -= 1
        elif self._rng.random() >= self._failure_share:
            return
        else:
            block_ids = block_ids[self._rng.randrange(len(block_ids)) :]
        for tensor in self._kv_caches.values():
            tensor[block_ids] = -1
        if self._num_steps and self._failure_share and self._rng.random() < 0.5:
            self._failed_requests.add(request_id)
        else:
            self._failed_block_ids.update(block_ids)
