"""The requests of the demo. Both runs, with and without a connector, serve the same requests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import attrs

from kvledger.adapters.lab.demo.model import FIRST_ORDINARY_TOKEN, VOCABULARY_SIZE

CONNECTOR: dict[str, str] = {
    "kv_connector": "KVLedgerConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""Values of `--kv-transfer-config`, as an operator writes them."""


def connector(log_dir: Path, **extra_config: Any) -> dict[str, Any]:
    """Return the JSON object of `--kv-transfer-config` for a connector that logs under `log_dir`.

    The connector offers every load, unless `extra_config` sets `offer`. The default for `offer` could offer no load on
    a busy machine, where computing with so small a model may be faster than loading.
    """
    return {**CONNECTOR, "kv_connector_extra_config": {"log_dir": str(log_dir), "offer": "always", **extra_config}}


@attrs.frozen
class Workload:
    """Requests, and a pool of KV blocks that is too small for all of them. Sizes are in tokens and blocks.

    By default, at most three of the six requests fit into the pool when they begin to decode, and at most two at their
    full length. vLLM therefore preempts the newest request. Prefix caching is off, so vLLM keeps nothing of a preempted
    request. All recovered tokens come from the host pool.
    """

    seed: int = 0
    num_requests: int = 6
    shortest_prompt: int = 250
    longest_prompt: int = 350
    max_tokens: int = 200
    num_blocks: int = 32
    block_size: int = 32
    chunk_size: int = 32
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 256
    max_model_len: int = 768
    enable_prefix_caching: bool = False

    def prompts(self) -> list[list[int]]:
        """Return the token ids of each prompt; equal seeds give equal prompts."""
        chance = random.Random(self.seed)  # noqa: S311 -- repeatable, not secret
        return [
            [
                chance.randrange(FIRST_ORDINARY_TOKEN, VOCABULARY_SIZE)
                for _ in range(chance.randint(self.shortest_prompt, self.longest_prompt))
            ]
            for _ in range(self.num_requests)
        ]

    def engine_arguments(self) -> dict[str, Any]:
        """Return arguments of `vllm.LLM`, except the model and the connector."""
        return {
            "block_size": self.block_size,
            "num_gpu_blocks_override": self.num_blocks,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "enable_prefix_caching": self.enable_prefix_caching,
            "dtype": "float32",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
        }
