"""Finds reasons why no prefix may be loaded for a model: in vLLM's configuration and the model's attention backends.

A hit is correct only if attention over the new tokens reads the loaded prefix, and if the KV of a token depends only on
the tokens up to this token. For other models, vLLM turns chunked prefill or prefix caching off, but it still looks up
requests in a connector. `docs/attention-backends.md` lists what each backend does.

This module agrees with the source of vLLM 0.32.0 and 0.33.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvledger.lifecycle import Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.kv_cache_interface import KVCacheConfig

_CPU_WITH_PREFIXES = "AMX_MLA"
"""The only latent attention on CPU for which vLLM keeps chunked prefill on (`platforms/cpu.py`,
check_and_update_config, 0.32 line 516, 0.33 line 533)."""
_WITHOUT_INVARIANCE = frozenset({"FLASHINFER", "TRITON_MLA"})
"""Backends for which vLLM turns prefix caching off under VLLM_BATCH_INVARIANT
(`model_executor/layers/attention/attention.py`, 0.32 line 373, 0.33 line 375)."""

_SOMETIMES_UNREAD = ("turboquant", "ultraquant")
"""First words of values of `--kv-cache-dtype`. Backends for these values ignore every prefix in a step whose longest
query is as long as the longest sequence. One other request with a new prompt can cause this
(`v1/attention/backends/turboquant_attn.py` line 740, `ultraquant_attn.py` line 317; 0.32 and 0.33)."""


def unusable_prefixes(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[str]:
    """Return the reasons why no prefix may be loaded; empty if prefixes may be loaded.

    It is no reason that prefix caching is off: an operator may switch it off although the backend reads prefixes.
    A process that has built the model also checks the model's layers. The scheduler's side has not built the model, so
    a worker checks the layers and reports the reasons.
    """
    model: Any = vllm_config.model_config
    if model is None:
        return []
    found = [
        *_not_causal(kv_cache_config),
        *_needs_every_token(model),
        *_not_read(vllm_config),
        *_not_always_read(vllm_config),
        *_not_invariant(vllm_config),
        *_rotated_by_row(vllm_config),
    ]
    return [str(refusal) for refusal in found]


def _not_causal(kv_cache_config: KVCacheConfig) -> Iterator[Refusal]:
    """Refuse attention that is not causal, for which vLLM turns chunked prefill and prefix caching off.

    See `v1/engine/core.py`, _initialize_kv_caches.
    """
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec: Any = group.kv_cache_spec
        per_layer = getattr(spec, "kv_cache_specs", None)
        if any(getattr(each, "non_causal", False) for each in (per_layer.values() if per_layer else (spec,))):
            reason = f"group {number} has attention that is not causal: the KV of a token depends on later tokens"
            yield Refusal(reason, "serve this model without KVLedgerConnector")
            return


def _needs_every_token(model: Any) -> Iterator[Refusal]:
    """Refuse pooling over the whole prompt, and encoders (`config/model.py`, is_prefix_caching_supported)."""
    if model.is_prefix_caching_supported:
        return
    pooler = getattr(model, "pooler_config", None)
    kinds = [getattr(pooler, name, None) for name in ("seq_pooling_type", "tok_pooling_type")]
    pooling = "/".join(str(kind) for kind in kinds if kind)
    kind = f"attention type {model.attn_type}" + (f", pooling {pooling}" if pooling else "")
    reason = f"vLLM supports no prefix caching for this model ({kind}): the result needs a forward over every token"
    yield Refusal(reason, "serve this model without KVLedgerConnector")


def _not_read(vllm_config: VllmConfig) -> Iterator[Refusal]:
    """Refuse backends that may ignore a loaded prefix.

    If chunked prefill is on, every backend continues from a prefix, because vLLM itself needs that. If it is off, a
    backend may ignore the prefix.
    """
    from vllm.platforms import CpuArchEnum, current_platform

    if vllm_config.scheduler_config.enable_chunked_prefill:
        return
    backends = {backend.get_name(): backend for backend in attention_backends(vllm_config)}
    is_cpu = current_platform.is_cpu()
    if is_cpu and vllm_config.model_config.use_mla:
        name = ", ".join(sorted(backends)) or _chosen_for_cpu(vllm_config)
        if name != _CPU_WITH_PREFIXES:
            reason = (
                f"with the attention backend {name} vLLM turns chunked prefill and prefix caching off, and does not "
                "promise that attention reads a prefix that was loaded"
            )
            yield Refusal(reason, "serve this model on a GPU or on a CPU with AMX")
            return
    # `engine/arg_utils.py`, _set_default_chunked_prefill_and_prefix_caching_args
    if is_cpu and current_platform.get_cpu_architecture() is CpuArchEnum.RISCV:
        reason = "vLLM turns chunked prefill and prefix caching off on RISC-V"
        yield Refusal(reason, "serve this model on another machine")
    for name, backend in sorted(backends.items()):
        if not backend.__module__.startswith("vllm."):
            reason = (
                f"chunked prefill is off, and the attention backend {name} ({backend.__module__}.{backend.__qualname__}"
                ") is not one of vLLM's: kvledger does not know whether it reads a prefix that was loaded"
            )
            yield Refusal(reason, "if the backend reads prefixes, start vLLM with --enable-chunked-prefill")


def _not_always_read(vllm_config: VllmConfig) -> Iterator[Refusal]:
    dtype = str(vllm_config.cache_config.cache_dtype)
    names = [backend.get_name() for backend in attention_backends(vllm_config)]
    for kind in _SOMETIMES_UNREAD:
        if dtype.startswith(kind) or kind.upper() in names:
            reason = (
                f"the attention backend {kind.upper()} ignores a loaded prefix in a step in which another request "
                "computes a prompt that is as long as the longest sequence of the step"
            )
            yield Refusal(reason, "choose another --kv-cache-dtype")


def _not_invariant(vllm_config: VllmConfig) -> Iterator[Refusal]:
    from vllm import envs

    if not envs.VLLM_BATCH_INVARIANT:
        return
    for name in sorted({backend.get_name() for backend in attention_backends(vllm_config)} & _WITHOUT_INVARIANCE):
        reason = f"under VLLM_BATCH_INVARIANT vLLM turns prefix caching off for {name}: a prefix changes the result"
        yield Refusal(reason, "unset VLLM_BATCH_INVARIANT or choose another attention backend")


def _rotated_by_row(vllm_config: VllmConfig) -> Iterator[Refusal]:
    """Refuse models for which vLLM's rotary kernel for CPU rotates a token by its row in the batch, not its position.

    The kernel uses the distance between two heads as the distance between two tokens (`csrc/cpu/pos_encoding.cpp`,
    rotary_embedding, `stride(-2)`). This is wrong for models like DeepSeek's, which rotate a slice of each head
    (`model_executor/layers/mla.py` and `models/deepseek_v2.py`, rotary_emb). With yarn, another class rotates the
    heads and does not use this kernel.
    """
    from vllm.platforms import current_platform

    text = vllm_config.model_config.hf_text_config
    operators = vllm_config.compilation_config.custom_ops
    uses_kernel = ("all" in operators or "+rotary_embedding" in operators) and "-rotary_embedding" not in operators
    is_sliced = bool(getattr(text, "qk_rope_head_dim", None))
    if not (current_platform.is_cpu() and uses_kernel and is_sliced):
        return
    rope = getattr(text, "rope_parameters", None) or {}
    is_other_class = vllm_config.model_config.use_mla and "yarn" in str(rope.get("rope_type"))
    if not is_other_class and _kernel_rotates_by_row():
        reason = (
            "vLLM's rotary kernel for CPU rotates a token of this model by its place in the batch, so the token's KV "
            "depends on more than the tokens up to it"
        )
        yield Refusal(reason, """start vLLM without --enforce-eager, or with -cc.custom_ops='["-rotary_embedding"]'""")


def _kernel_rotates_by_row() -> bool:
    """Whether the kernel rotates a token with several heads differently if another token precedes it in the batch."""
    import torch
    from vllm import _custom_ops

    size = 2
    angles = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])  # of positions 0 and 1: a quarter and a half turn
    positions = torch.tensor([0, 1, *[0] * 8])  # a kernel that takes heads for tokens reads past the two
    both, alone = torch.ones(2, 2, size), torch.ones(1, 2, size)
    try:
        _custom_ops.rotary_embedding(positions[:2], both, torch.ones(2, 1, size), size, angles, True)  # noqa: FBT003
        _custom_ops.rotary_embedding(positions[1:2], alone, torch.ones(1, 1, size), size, angles, True)  # noqa: FBT003
    except (AttributeError, RuntimeError):  # a build without the kernel rotates nothing
        return False
    return not torch.equal(both[1:], alone)


def attention_backends(vllm_config: VllmConfig) -> set[type[AttentionBackend]]:
    """Return the attention backends of the model's layers; empty in a process that has not built the model."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    found = {layer.get_attn_backend() for layer in layers if hasattr(layer, "get_attn_backend")}
    return {backend for backend in found if backend is not None}


def _chosen_for_cpu(vllm_config: VllmConfig) -> str:
    """Return the name of the backend that vLLM chooses for latent attention on this CPU (`platforms/cpu.py`)."""
    from types import SimpleNamespace

    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    chooser: Any = current_platform
    wanted = SimpleNamespace(use_mla=True, use_sparse=False, kv_cache_dtype=vllm_config.cache_config.cache_dtype)
    path = chooser.get_attn_backend_cls(vllm_config.attention_config.backend, wanted)
    return str(resolve_obj_by_qualname(path).get_name())
