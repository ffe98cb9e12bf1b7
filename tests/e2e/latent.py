"""A DeepSeek as small as vLLM's latent attention (MLA) on CPU allows, and a connector that serves it there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvledger.adapters.vllm import KVLedgerConnector

YARN = {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 2048,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "beta_fast": 32,
    "beta_slow": 1,
}
"""As all released DeepSeeks. Without it vLLM 0.32 rotates with a kernel for CPU that is wrong for these models."""


def make_latent_model(directory: Path, **more: Any) -> Path:
    """Write its weights; `more` goes to `DeepseekV2Config`."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 64, "v_head_dim": 64}
    latent = {"q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1, "moe_intermediate_size": 64}
    other = {"first_k_dense_replace": 2, "max_position_embeddings": 4096, "initializer_range": 0.1, "dtype": "float32"}
    configuration = DeepseekV2Config(**sizes, **heads, **latent, **experts, **other, **more)
    shutil.rmtree(directory, ignore_errors=True)
    DeepseekV2ForCausalLM(configuration).save_pretrained(directory)
    return directory


class ContinuingConnector(KVLedgerConnector):
    """Serves a model for which vLLM turns chunked prefill off: on a CPU without AMX that is every one with MLA."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        vllm_config.scheduler_config.enable_chunked_prefill = True
        super().__init__(vllm_config, role, kv_cache_config)
