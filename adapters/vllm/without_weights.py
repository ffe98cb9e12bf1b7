"""Computes the layout of the KV cache that vLLM would create for a model, from the model's `config.json`.

This needs no weights, no memory for the cache and no device. vLLM's own classes make the whole configuration, the
model's layers, and their groups and pages (`v1/core/kv_cache_utils.py`, get_kv_cache_configs, 0.32). The layers are on
torch's device "meta", which holds no numbers. For several ranks, the cache of one rank is computed, with attention
heads divided as vLLM divides them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
import pydantic

from kvledger.adapters.vllm.refusals import refusals
from kvledger.lifecycle import ConfigurationError, Refusal, described

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.worker.utils import AttentionGroup

_NUM_BLOCKS = 1 << 20
"""Number of blocks, enough for any request. vLLM knows the real number only after it has loaded the weights. The layout
of a block does not depend on the number, and nothing is allocated here."""
_ENDLESS_BYTES = 1 << 50


@attrs.frozen
class ModelOptions:
    """Options of vLLM that the layout of its KV cache depends on. None means vLLM's own default."""

    block_size: int | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    enforce_eager: bool = False
    prefix_caching_hash_algo: str | None = None


def configured(model: Path, options: ModelOptions, transfer: dict[str, Any]) -> VllmConfig:
    """Return the configuration that `vllm serve` would make on this machine.

    If vLLM refuses a value, this raises a ConfigurationError with kvledger's message. Other errors of vLLM are raised
    unchanged.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    given: dict[str, Any] = attrs.asdict(options, filter=lambda _, value: value is not None)
    if options.tensor_parallel_size > 1:
        given["distributed_executor_backend"] = "mp"  # the default, unless there are fewer devices here
    try:
        vllm_config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            num_gpu_blocks_override=_NUM_BLOCKS,
            kv_transfer_config=KVTransferConfig(**transfer),
            **given,
        ).create_engine_config()
    except pydantic.ValidationError as error:
        found = refusals(error)
        if not any(each.key for each in found):  # perhaps only for lack of a device here
            raise
        raise ConfigurationError(*found) from None
    if options.data_parallel_size > 1 and not vllm_config.model_config.is_moe:  # as v1/engine/core.py, run_engine_core
        vllm_config.parallel_config.reconfigure_for_independent_dp_rank()
    return vllm_config


def in_words(error: BaseException) -> str:
    """Return the text of vLLM's error as one line, without the text that pydantic adds."""
    if isinstance(error, pydantic.ValidationError):
        said = "; ".join(problem["msg"].removeprefix("Value error, ") for problem in error.errors())
    else:
        said = described(error)
    return " ".join(said.split()).rstrip(".")


def platform() -> str:
    """Return the platform that vLLM would use here, such as "cpu" or "cuda". Block sizes and kernels depend on it."""
    from vllm.platforms import current_platform

    return current_platform.device_type or "no device known to this vLLM"


def kv_cache_of(vllm_config: VllmConfig) -> KVCacheConfig:
    """Return the KV cache configuration that each worker would get, but with an arbitrary number of blocks.

    Raises:
        ConfigurationError: the model's attention backends on this machine do not support blocks of this size.
        Exception: whatever vLLM raises.
    """
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core import single_type_kv_cache_manager
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.worker.worker_base import WorkerBase

    untyped: Any = single_type_kv_cache_manager
    untyped.register_all_kvcache_specs(vllm_config)
    num_ranks = vllm_config.parallel_config.world_size
    specs = {name: _of_one_rank(spec, num_ranks) for name, spec in _specs(vllm_config).items()}
    worker: Any = SimpleNamespace(vllm_config=vllm_config)
    resolve_kv_cache_layout(vllm_config, [WorkerBase.get_supported_kv_cache_layouts(worker)], specs.values())
    kv_cache_config = get_kv_cache_configs(vllm_config, [specs] * num_ranks, [_ENDLESS_BYTES] * num_ranks)[0]
    _refuse_kernels(vllm_config, kv_cache_config)
    return kv_cache_config


def _refuse_kernels(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse attention kernels that a worker would refuse (`v1/worker/gpu_model_runner.py`, 0.32).

    The kernels must support the block size (`v1/worker/utils.py`, prepare_kernel_block_sizes). On CPU, this function
    also sets up each backend, which makes further checks. On other devices it does not, because setup allocates memory.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.worker.utils import prepare_kernel_block_sizes

    divided = _attention_groups(vllm_config, kv_cache_config)
    try:
        sizes = prepare_kernel_block_sizes(kv_cache_config, divided)
    except ValueError as error:
        block_size = vllm_config.cache_config.block_size
        reason = f"no attention kernel of this model supports this block size on this machine ({platform()}): {error}"
        usual = _block_sizes(vllm_config, kv_cache_config)
        elsewhere = "run this command on the server's machine"
        remedy = f"write {usual}, or {elsewhere}" if usual else elsewhere
        raise ConfigurationError(Refusal(reason.rstrip("."), remedy, "--block-size", block_size)) from error
    if current_platform.is_cpu():
        with set_current_vllm_config(vllm_config):
            for groups, size in zip(divided, sizes, strict=False):  # encoders have no size
                for group in groups:
                    group.create_metadata_builders(vllm_config, torch.device("cpu"), size)


def _block_sizes(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return the usual block sizes that the model's attention supports here, such as "32 or 64"; empty if none."""
    from vllm.v1.kv_cache_interface import AttentionSpec
    from vllm.v1.worker.utils import select_common_block_size

    groups = [
        group
        for groups in _attention_groups(vllm_config, kv_cache_config)
        for group in groups
        if isinstance(group.kv_cache_spec, AttentionSpec)
    ]
    taken = []
    for size in (16, 32, 64, 128, 256):
        with contextlib.suppress(ValueError):
            for group in groups:
                select_common_block_size(size, [group.backend], [group.kv_cache_spec])
            taken.append(str(size))
    *others, last = taken or [""]
    return f"{', '.join(others)} or {last}" if others else last


def _attention_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[list[AttentionGroup]]:
    """Divide each KV cache group by attention backend, as the model runner does.

    See `v1/worker/gpu_model_runner.py`, initialize_attn_backend.
    """
    from vllm.v1.worker.utils import AttentionGroup

    layers: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    divided = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        alike: dict[Any, AttentionGroup] = {}
        for name in group.layer_names:
            backend, spec = layers[name].get_attn_backend(), per_layer.get(name, group.kv_cache_spec)
            key = backend.full_cls_name(), spec
            alike.setdefault(key, AttentionGroup(backend, [], spec, number)).layer_names.append(name)
        divided.append(list(alike.values()))
    return divided


def _specs(vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """Return layer → KV cache spec, in the same way as vLLM's model runner.

    See `v1/worker/gpu_model_runner.py`, get_kv_cache_spec, 0.32. Before that call, the platform may change the block
    size (`v1/executor/uniproc_executor.py`, 0.32). It does so for kernels that support only one size, and for hybrid
    models, whose Mamba pages and attention pages must have the same size.
    """
    import torch
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    dtype: Any = vllm_config.model_config.dtype
    kind: Any = AttentionLayerBase
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(set_current_vllm_config(vllm_config))
        stack.callback(destroy_distributed_environment)
        stack.callback(destroy_model_parallel)
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with torch.device("meta"), set_default_torch_dtype(dtype):
            initialize_model(vllm_config=vllm_config, model_config=vllm_config.model_config)
        current_platform.update_block_size_for_backend(vllm_config)
        layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, kind)
        own = {name: x for name, x in layers.items() if not getattr(x, "kv_sharing_target_layer_name", None)}
        found = {name: layer.get_kv_cache_spec(vllm_config) for name, layer in own.items()}
    return {name: spec for name, spec in found.items() if spec is not None}


def _of_one_rank(spec: KVCacheSpec, num_ranks: int) -> KVCacheSpec:
    """Return the spec of one rank's part of a layer. The layer's attention heads are divided among the ranks.

    If there are fewer heads than ranks, several ranks hold the same head (`config/model.py`, get_num_kv_heads, 0.32).
    Latent attention has one head, which every rank holds.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec

    if num_ranks == 1 or isinstance(spec, MLAAttentionSpec) or not isinstance(spec, AttentionSpec):
        return spec
    return dataclasses.replace(spec, num_kv_heads=max(1, spec.num_kv_heads // num_ranks))
