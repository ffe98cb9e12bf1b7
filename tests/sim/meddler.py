"""A child of a `MultiConnector` that reports ends which it does not owe, as several connectors have done.

A connector of the tests' own, because a real one has no way to be made to misbehave. It loads and saves nothing.
"""

from __future__ import annotations

from typing import Any

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)


@attrs.frozen(slots=False)
class Ends(KVConnectorMetadata):
    """What the worker reports with this step."""

    request_ids: tuple[str, ...] = ()
    block_ids: tuple[int, ...] = ()


class Meddler(KVConnectorBase_V1, SupportsHMA):
    """Reports ends of every request whose id begins with "victim".

    Options: `field`: what it reports (`finished_recving`, `failed_recving`, `finished_sending`, `invalid_block_ids`);
    `after`: the hook behind which it begins, `update_state_after_alloc` or `request_finished`; `num_steps`: it reports
    so often, once in each step; `keeps`: whether it keeps requests that end, so that it does owe their end.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = self._kv_transfer_config.kv_connector_extra_config
        self._field: str = options["field"]
        self._after: str = options.get("after", "update_state_after_alloc")
        self._num_steps: int = options.get("num_steps", 1)
        self._keeps: bool = options.get("keeps", False)
        self._planned: list[Ends] = []
        self._seen: set[tuple[str, int]] = set()

    def _plan(self, request: Any, block_ids: Any) -> None:
        life = request.request_id, request.num_preemptions
        if request.request_id.startswith("victim") and life not in self._seen:
            self._seen.add(life)
            self._planned += [Ends((request.request_id,), tuple(block_ids[0]))] * self._num_steps

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:  # noqa: ARG002
        """It has nothing."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ARG002
        """It is told 0, and goes to work all the same."""
        if self._after == "update_state_after_alloc":
            self._plan(request, blocks.get_block_ids())

    def build_connector_meta(self, scheduler_output: Any) -> Ends:  # noqa: ARG002 -- vLLM's signature
        """One report in each step."""
        return self._planned.pop(0) if self._planned else Ends()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """It keeps nothing, unless it was told to."""
        if self._after == "request_finished":
            self._plan(request, block_ids)
        return self._keeps and request.request_id.startswith("victim"), None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """It loads nothing."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """What it does not owe."""
        request_ids = set(self._ends.request_ids)
        if self._field == "failed_recving":
            return KVConnectorTransferResults(finished_recving=request_ids, failed_recving=request_ids)
        return KVConnectorTransferResults(**({} if self._field == "invalid_block_ids" else {self._field: request_ids}))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that it has nothing to do with."""
        return set(self._ends.block_ids) if self._field == "invalid_block_ids" else set()

    @property
    def _ends(self) -> Ends:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Ends)
        return metadata

    def wait_for_layer_load(self, layer_name: str) -> None:
        """It loads nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """It saves nothing."""

    def wait_for_save(self) -> None:
        """It saves nothing."""
