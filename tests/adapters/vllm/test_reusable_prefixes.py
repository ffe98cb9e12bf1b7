"""Models whose attention cannot go on from a loaded prefix: no hit, and the reason for people, the log and `check`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, UniformTypeKVCacheSpecs

from kvledger.adapters.lab.simulation.connectors import KVLEDGER_TRANSFER
from kvledger.adapters.lab.simulation.engine import kv_cache_config, vllm_config
from kvledger.adapters.vllm import KVLedgerConnector
from kvledger.adapters.vllm.reusable_prefixes import unusable_prefixes
from kvledger.adapters.vllm.without_weights import ModelOptions, configured

pytestmark = pytest.mark.scheduler

TRANSFER = {**KVLEDGER_TRANSFER, "kv_connector_extra_config": {"log_dir": None, "chunk_size": 16}}
FULL = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.int64)

on_cpu = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM is not built for CPU")


class TheirBackend(CPUAttentionBackend):
    """A plugin's, of which nobody has read whether it reads prefixes."""

    @staticmethod
    def get_name() -> str:
        """As vLLM asks for it."""
        return "THEIRS"


def configuration(*backends: type, chunked_prefill: bool = True, **model: Any) -> Any:
    """VLLM's, of a model whose layers have these backends."""
    settings = vllm_config(num_blocks=20, kv_transfer=TRANSFER)
    settings.scheduler_config.enable_chunked_prefill = chunked_prefill
    layers = settings.compilation_config.static_forward_context
    for number, backend in enumerate(backends):
        layers[f"layer.{number}"] = SimpleNamespace(get_attn_backend=lambda backend=backend: backend)
    for name, value in model.items():
        setattr(settings.model_config, name, value)
    return settings


def reasons(settings: Any) -> list[str]:
    """Of a model with full attention."""
    return unusable_prefixes(settings, kv_cache_config(20, 16))


@pytest.mark.parametrize("has_own_specs", [False, True])
def test_attention_that_is_not_causal_gets_no_hit(has_own_specs: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The KV of a token of a prefix language model depends on tokens after it; vLLM's engine core turns its own prefix
    cache off, and asked the connector, which offered what other prompts had saved.
    """
    config = kv_cache_config(20, 16)
    names, spec = config.kv_cache_groups[0].layer_names, dataclasses.replace(FULL, non_causal=True)
    whole = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=dict.fromkeys(names, spec)) if has_own_specs else spec
    config.kv_cache_groups[0] = KVCacheGroupSpec(names, whole)
    connector = KVLedgerConnector(configuration(), KVConnectorRole.SCHEDULER, config)
    assert connector.scheduler_side.journal.is_disabled
    assert "the model is declined" in caplog.text
    assert "group 0 has attention that is not causal" in caplog.text
    connector.shutdown()


@pytest.mark.parametrize("backends", [(), (CPUAttentionBackend,), (CPUAttentionBackend, TheirBackend)])
def test_with_chunked_prefill_every_backend_is_served(backends: tuple[type, ...]) -> None:
    """VLLM itself goes on from a prefix then."""
    assert reasons(configuration(*backends)) == []


def test_without_chunked_prefill_a_backend_of_vllm_is_served_and_an_unknown_one_is_not() -> None:
    """An operator may have switched it off; only of vLLM's own backends it is known that they read prefixes."""
    assert reasons(configuration(CPUAttentionBackend, chunked_prefill=False)) == []
    (reason,) = reasons(configuration(CPUAttentionBackend, TheirBackend, chunked_prefill=False))
    assert f"the attention backend THEIRS ({__name__}.TheirBackend) is not one of vLLM's" in reason
    assert reason.endswith("start vLLM with --enable-chunked-prefill")


@pytest.mark.parametrize("dtype", ["turboquant_k8v4", "turboquant_4bit_nc", "ultraquant_4bit"])
def test_a_backend_that_ignores_a_prefix_beside_a_long_prompt_is_not_served(dtype: str) -> None:
    """Both take a step for one without prefixes if its longest query is as long as its longest sequence."""
    settings = configuration()
    settings.cache_config.cache_dtype = dtype
    (reason,) = reasons(settings)
    assert f"{dtype.partition('_')[0].upper()} ignores a loaded prefix" in reason
    assert "--kv-cache-dtype" in reason


@on_cpu
def test_risc_v_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM turns both off there, whatever the operator says."""
    monkeypatch.setattr(type(current_platform), "get_cpu_architecture", classmethod(lambda _: CpuArchEnum.RISCV))
    (reason,) = reasons(configuration(chunked_prefill=False))
    assert "RISC-V" in reason


def test_where_results_must_not_depend_on_a_prefix_none_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM turns prefix caching off for two backends under VLLM_BATCH_INVARIANT, in the worker alone."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert reasons(configuration(CPUAttentionBackend)) == []
    (reason,) = reasons(configuration(TritonMLABackend))
    assert "TRITON_MLA" in reason


@on_cpu
def test_a_scheduler_that_has_not_built_the_model_knows_the_backend_of_this_cpu(tmp_path: Path) -> None:
    """With workers in other processes, among other connectors too, no request is told of a hit before they report."""
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    sizes = {"num_hidden_layers": 2, "first_k_dense_replace": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    more = {"q_lora_rank": None, "vocab_size": 128, "hidden_size": 128, "max_position_embeddings": 2048}
    named = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps({**latent, **sizes, **more, **named}))
    settings = configured(tmp_path, ModelOptions(), TRANSFER)
    assert settings.compilation_config.static_forward_context == {}
    has_amx = torch.cpu._is_amx_tile_supported()
    assert ["CPU_MLA" in reason for reason in reasons(settings)] == [True] * (not has_amx)
    settings.scheduler_config.enable_chunked_prefill = True
    assert reasons(settings) == []


@on_cpu
def test_a_cpu_with_amx_is_served_though_chunked_prefill_is_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its backend reads prefixes, and vLLM leaves both on."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    settings = configuration(chunked_prefill=False)
    monkeypatch.setattr(type(settings.model_config), "use_mla", True)
    assert reasons(settings) == []
