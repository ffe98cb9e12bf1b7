"""A connector of the tests' own: what it looks at, or raises, in each hook is for the test to say.

It finds nothing and saves nothing. It knows vLLM's hooks, nothing of kvledger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


class Copied(KVConnectorStats):
    """Its figures: how many bytes."""

    def reduce(self) -> dict[str, int | float]:
        """As they are."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was copied."""
        return not self.data

    def reset(self) -> None:
        """Forget."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Both together."""
        return Copied({"bytes": self.data["bytes"] + other.data["bytes"]})


class PlainWitness(KVConnectorBase_V1):
    """Without vLLM's hybrid memory."""

    on_hook: ClassVar[Callable[[str], None]] = staticmethod(lambda _hook: None)
    """Called first in each hook of the scheduler's side, with the hook's name."""
    num_bytes = 7

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """As its configuration says."""
        return bool(extra_config.get("piecewise"))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        """As its configuration says."""
        return str(vllm_config.kv_transfer_config.kv_connector_extra_config["layout"])

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Its own figures."""
        return None if data is None else Copied(data)

    def get_kv_connector_stats(self) -> KVConnectorStats:
        """Something."""
        return Copied({"bytes": self.num_bytes})

    def on_new_request(self, request: Any) -> None:  # noqa: ARG002 -- vLLM's signature, here and below
        """Look."""
        type(self).on_hook("on_new_request")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:  # noqa: ARG002
        """Nothing."""
        type(self).on_hook("get_num_new_matched_tokens")
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ARG002
        """Look."""
        type(self).on_hook("update_state_after_alloc")

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ARG002
        """Nothing to do."""
        type(self).on_hook("build_connector_meta")
        return KVConnectorMetadata()

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ARG002
        """Look."""
        type(self).on_hook("update_connector_output")

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:  # noqa: ARG002
        """Nothing is kept."""
        type(self).on_hook("request_finished")
        return False, None

    def reset_cache(self) -> bool:
        """Nothing to forget."""
        type(self).on_hook("reset_cache")
        return True

    def shutdown(self) -> None:
        """Look."""
        type(self).on_hook("shutdown")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""


class Witness(PlainWitness, SupportsHMA):
    """With it."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:  # noqa: ARG002
        """Nothing is kept."""
        type(self).on_hook("request_finished_all_groups")
        return False, None
