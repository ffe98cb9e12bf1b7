"""Decides which options of a connector a log may contain.

An allow list names these options, because no rule recognises every secret. The values of other options are replaced by
their type and length. Comments in the list name the files that read the options. There, C stands for
`distributed/kv_transfer/kv_connector/v1/`, and O for `v1/kv_offload/`. Paths are in `vllm/` of vLLM 0.32, except where
the comment names another source.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

from kvledger.lifecycle import Hidden

__all__ = ["is_recorded", "recorded_options", "without_unrecorded"]

_NUMBERS: Final = frozenset(
    {
        # kvledger's own, in adapters/vllm
        "chunk_size",
        "digests",
        "host_bytes",
        "keep_for_preempted",
        "max_deferred_lookups",
        "max_failed_loads",
        "max_log_age_hours",
        "max_log_bytes",
        "max_log_wait_ms",
        "max_silent_ms",
        "max_silent_steps",
        "memory_log_bytes",
        "save_interval_tokens",
        "save_tails",
        "segment_bytes",
        "share_pool",
        "sync_interval_ms",
        # config/kv_transfer.py, KVTransferConfig and HiSparseConnector
        "enable_permute_local_kv",
        "host_pool_gib",
        # OffloadingConnector: C/offloading/config.py, O/base.py, O/cpu/spec.py
        "block_size",
        "blocks_per_chunk",
        "canonical_layout",
        "cpu_bytes_to_use",
        "max_tracker_size",
        "offload_prompt_only",
        "self_describing_kv_events",
        "store_threshold",
        # Its tiers: O/tiering/backpressure.py and the managers in O/tiering/*/manager.py
        "abandon_timeout_ms",
        "alpha",
        "cooldown_s",
        "decay_half_life_s",
        "eager_ctrl_connect",
        "enable_kv_events",
        "enable_telemetry",
        "high_water_s",
        "io_threads",
        "low_water_s",
        "metadata_retry_interval_ms",
        "n_read_threads",
        "n_write_threads",
        "operation_timeout_ms",
        "opportunistic_query",
        "secondary_g2_slots",
        "unbound_store_timeout_s",
        "warmup_completions",
        # C/simple_cpu_offload_connector.py
        "cpu_bytes_to_use_per_rank",
        "disk_buffer_slots",
        "disk_capacity_bytes",
        "lazy_offload",
        "use_page_cache",
        # C/lmcache_connector.py, C/lmcache_mp_connector.py, C/lmcache_integration/vllm_v1_adapter.py
        "discard_partial_chunks",
        "lmcache.mp.heartbeat_interval",
        "lmcache.mp.mq_timeout",
        "skip_last_n_tokens",
        "use_layerwise",
        "use_native",
        # LMCache, lmcache/v1/config.py: the adapter passes it every option that begins with "lmcache."
        "lmcache.blend_min_tokens",
        "lmcache.blocking_timeout_secs",
        "lmcache.chunk_size",
        "lmcache.enable_async_loading",
        "lmcache.enable_blending",
        "lmcache.enable_lazy_memory_allocator",
        "lmcache.enable_p2p",
        "lmcache.enable_pd",
        "lmcache.gds_buffer_size",
        "lmcache.local_cpu",
        "lmcache.lookup_timeout_ms",
        "lmcache.max_local_cpu_size",
        "lmcache.max_local_disk_size",
        "lmcache.min_retrieve_tokens",
        "lmcache.pd_buffer_size",
        "lmcache.reserve_local_cpu_size",
        "lmcache.save_decode_cache",
        "lmcache.save_unfull_chunk",
        "lmcache.use_gds",
        "lmcache.use_layerwise",
        # C/nixl/
        "bidirectional_kv_xfer",
        "decoder_kv_blocks_ttl",
        "enable_cross_layers_blocks",
        "enforce_handshake_compat",
        "engine_ttl",
        "kv_lease_duration",
        "kv_recompute_threshold",
        "num_threads",
        "push_registration_timeout",
        # C/mooncake/mooncake_connector.py and C/mooncake/store/
        "enable_group_semantics",
        "enable_lookup",
        "enable_store_tp_lcm",
        "load_async",
        "lookup_async",
        "num_workers",
        "prefill_tp_sizes",
        "save_decode_cache",
        "store_tp_size",
        # C/moriio/moriio_common.py
        "defer_timeout",
        "post_batch_size",
        "qp_per_transfer",
        "read_mode",
        "recv_abort_timeout",
        "transfer_timeout",
        # C/hf3fs/hf3fs_connector.py
        "hf3fs_client_numjobs",
        "hf3fs_file_size",
        "hf3fs_max_device_buffer_count",
        # C/decode_bench_connector.py, C/example_hidden_states_connector.py
        "allow_custom_save_path",
        "fill_mean",
        "fill_std",
        "num_writer_threads",
        "startup_fill",
        "use_synchronization_lock",
    }
)
"""Options that are numbers, booleans or sizes such as "64MiB"."""
_WORDS: Final = frozenset(
    {
        # kvledger's own, in adapters/vllm
        "digests",
        "durability",
        "kv_cache_layout",
        "load_mode",
        "offer",
        "save_mode",
        # config/kv_transfer.py, KVTransferConfig
        "kv_buffer_device",
        "kv_load_failure_policy",
        "kv_role",
        # O/cpu/spec.py, O/tiering/factory.py
        "eviction_policy",
        "locality",
        "type",
        # C/simple_cpu_offload_connector.py, C/nixl/, O/tiering/p2p/manager.py, C/mooncake/, C/moriio/moriio_common.py
        "backend",
        "backends",
        "custom_mem_pool",
        "kv_offload_backend",
        "protocol",
        # LMCache, lmcache/v1/config.py
        "lmcache.cache_policy",
        "lmcache.gds_backend",
        "lmcache.nixl_backends",
        "lmcache.numa_mode",
        "lmcache.pd_backend_mode",
        "lmcache.pd_role",
        "lmcache.pre_caching_hash_algorithm",
        "lmcache.remote_serde",
        "lmcache.transfer_channel",
    }
)
"""Options whose value is one of a few words of kvledger, vLLM or LMCache."""
_CODE: Final = frozenset(
    {
        # config/kv_transfer.py, KVTransferConfig
        "kv_connector",
        "kv_connector_module_path",
        # O/factory.py, O/cpu/spec.py, O/tiering/factory.py
        "backpressure_cls",
        "cache_policy_module_path",
        "module_path",
        "policy_cls",
        "spec_module_path",
        "spec_name",
    }
)
"""Options that name a Python class or module."""
_NESTED: Final = frozenset(
    {
        # C/multi_connector.py, KVTransferConfig, adapters/recorder/settings.py: a connector in another
        "connector",
        "connectors",
        "kv_connector_extra_config",
        # O/tiering/spec.py
        "backpressure",
        "secondary_tiers",
    }
)
"""Options that hold other options, each judged by its own name."""

_SIZE: Final = re.compile(r"[0-9]{1,15}(\.[0-9]{1,6})?\s?([kmgtp]i?)?b?|true|false", re.IGNORECASE)
_WORD: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_DOTTED: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}(\.[A-Za-z_][A-Za-z0-9_]{0,63}){0,15}")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z_.-]*([0-9][A-Za-z_.-]*){0,3}")
_MAX_NAME: Final = 48
"""Characters. The longest name in the list has 38."""
_MAX_NUMBER: Final = 1 << 53
_MAX_DEPTH: Final = 8
_MAX_ITEMS: Final = 64
_MIN_LEFT_OUT: Final = 4
_ENDING: Final = ", not recorded)"


def recorded_options(options: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a connector's options in the form in which a log may contain them.

    A name is kept if it has at most 48 characters, which may be letters, `_`, `-`, `.` and up to 3 digits. A value is
    kept if its name is on the allow list and the value has the expected form. Any other value is replaced by its type
    and length.
    """
    return _mapping(options, 0)


def is_recorded(value: object) -> bool:
    """Whether `value`, from a log, is the configured value. False if it is only the value's type and length."""
    return not (isinstance(value, str) and value.startswith("(") and value.endswith(_ENDING))


def without_unrecorded(text: str, options: Mapping[Any, Any]) -> str:
    """Return the message `text`, with "…" in place of each text or number of `options` that a log may not contain.

    The message is a connector's exception, for example. Values of fewer than four characters are not removed, because
    they also occur in words.
    """
    unrecorded = set(_leaves(options)) - set(_leaves(recorded_options(options)))
    forms = {form for value in unrecorded for form in _forms(value)}
    for value in sorted(forms, key=len, reverse=True):
        if len(value) >= _MIN_LEFT_OUT:
            text = text.replace(value, "…")
    return text


def _forms(value: str) -> Iterator[str]:
    """Yield the forms in which an exception may quote the text `value`, including user and password of an address."""
    yield from (value, repr(value)[1:-1], json.dumps(value)[1:-1], quote(value, safe=""))
    credentials, at, _ = value.partition("://")[2].rpartition("@")
    if at:
        for part in (credentials, *credentials.split(":", 1)):
            yield from (part, unquote(part))


def _leaves(value: object) -> Iterator[str]:
    """Yield every text and every number in `value`, and the names of options."""
    match value:
        case Mapping():
            for name, item in value.items():
                yield str(name)
                yield from _leaves(item)
        case list() | tuple() | set() | frozenset():
            for item in value:
                yield from _leaves(item)
        case str() | float() | int() if not isinstance(value, bool):
            yield str(value)


def _mapping(options: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    return {
        _shown_name(name, number): _value(str(name), value, depth)
        for number, (name, value) in enumerate(options.items())
    }


def _shown_name(name: object, number: int) -> str:
    """Return the option's name, or, if it does not look like a name, the option's number and the name's length."""
    if isinstance(name, str) and len(name) <= _MAX_NAME and _NAME.fullmatch(name):
        return name
    return f"(option {number}, with a name of {len(str(name))} characters{_ENDING}"


def _value(name: str, value: Any, depth: int) -> Any:
    if value is None:
        return None
    if depth < _MAX_DEPTH:
        if name in _NESTED and isinstance(value, Mapping):
            return _mapping(value, depth + 1)
        if name in _NESTED and _is_list(value) and all(isinstance(item, Mapping) for item in value):
            return [_mapping(item, depth + 1) for item in value]
        if name not in _NESTED and _is_list(value) and value and all(_is_plain(name, item) for item in value):
            return list(value)
    return value if _is_plain(name, value) else _described(value)


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) <= _MAX_ITEMS


def _is_plain(name: str, value: object) -> bool:
    """Whether the option's name is on the allow list and `value` has the expected form."""
    match value:
        case bool():
            return name in _NUMBERS
        case int():
            return name in _NUMBERS and abs(value) < _MAX_NUMBER
        case float():
            return name in _NUMBERS and math.isfinite(value)
        case str():
            is_size = name in _NUMBERS and _SIZE.fullmatch(value)
            is_word = name in _WORDS and _WORD.fullmatch(value)
            return bool(is_size or is_word or (name in _CODE and _DOTTED.fullmatch(value)))
    return False


def _described(value: object) -> str:
    return f"{str(Hidden.of(value)).removesuffix(')')}{_ENDING}"
