"""Finds the window of each KV cache group of a model, and the reasons why kvledger cannot serve the model.

A group is a set of layers with one block table (`v1/kv_cache_interface.py`, 0.32). kvledger serves a model only if it
can serve all groups, because a request cannot continue after a prefix that lacks the KV of a group. Otherwise
it declines the model, whose requests then run as without a connector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvledger.adapters.vllm import versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_REMEDY = "start vLLM with --disable-hybrid-kv-cache-manager if the model allows it"


@attrs.frozen
class Groups:
    """The groups of a model, in vLLM's order."""

    windows: tuple[int, ...]
    """Window of each group in tokens, 0 for a group without a window. Meaningless if `declined` is not empty."""
    declined: tuple[str, ...]
    """Reasons why the model is not served; empty if the model is served."""


def describe_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Groups:
    """Return the window of each group, and the reasons to decline the model."""
    groups = kv_cache_config.kv_cache_groups
    windows: list[int] = []
    numbers_of: dict[tuple[str, str], list[int]] = {}
    for number, group in enumerate(groups):
        specs = _layer_specs(group.kv_cache_spec)
        window, reason = _window(specs)
        reason = reason or _special(group)
        if not reason and group.kv_cache_spec.block_size != groups[0].kv_cache_spec.block_size:
            reason = (
                f"has blocks of {group.kv_cache_spec.block_size} tokens, but group 0 has blocks of "
                f"{groups[0].kv_cache_spec.block_size}; {_REMEDY}"
            )
        windows.append(window)
        if reason:
            kinds = ", ".join(sorted({type(spec).__name__ for spec in specs}))
            numbers_of.setdefault((kinds, reason), []).append(number)
    declined = [f"{_named(numbers)} ({kinds}) {reason}" for (kinds, reason), numbers in numbers_of.items()]
    if not declined:
        declined += _declined_together(vllm_config, kv_cache_config, windows)
    return Groups(tuple(windows), tuple(declined))


def _named(numbers: Sequence[int]) -> str:
    return f"group {numbers[0]}" if len(numbers) == 1 else f"each of the groups {', '.join(map(str, numbers))}"


def _declined_together(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, windows: Sequence[int]) -> list[str]:
    if not windows:
        return ["the model has no KV cache"]
    if all(windows):
        return [f"every group sees only a window ({', '.join(map(str, windows))} tokens); {_REMEDY}"]
    if any(windows) and versions.uses_speculation(vllm_config):
        return [f"speculative decoding takes back tokens after sliding windows have moved on past them; {_REMEDY}"]
    if len(windows) > 1 and kv_cache_config.needs_kv_cache_zeroing:
        return ["vLLM zeroes new blocks before kvledger can copy out of them"]
    if not _pages_coincide(kv_cache_config):
        return ["pages of different groups overlap only in part"]
    return []


def _layer_specs(spec: Any) -> list[Any]:
    per_layer = getattr(spec, "kv_cache_specs", None)  # UniformTypeKVCacheSpecs: one spec per layer
    return list(per_layer.values()) if per_layer else [spec]


def _window(specs: Sequence[Any]) -> tuple[int, str]:
    """Return the window of the layers (0: no window), and why the layers are declined (empty: they are not).

    The type of each spec must be exactly FullAttentionSpec, MLAAttentionSpec or SlidingWindowSpec, because their other
    subclasses free or reuse blocks in other ways.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    if all(type(spec) in {FullAttentionSpec, MLAAttentionSpec} for spec in specs):
        return 0, ""
    if all(type(spec) is SlidingWindowSpec for spec in specs):
        sizes = {(spec.sliding_window, spec.extra_retained_tokens) for spec in specs}
        if len(sizes) == 1 and not specs[0].extra_retained_tokens:
            return int(specs[0].sliding_window), ""
        return 0, f"has layers with different windows; {_REMEDY}"
    return 0, "does not keep the KV of every token, or of the last tokens, in the block to which the KV was written"


def _special(group: Any) -> str:
    if getattr(group, "host_resident", False):
        return "is already in host memory"
    if not getattr(group, "enable_kv_transfer", True) or not group.kv_cache_spec.prefix_cacheable:
        return "is excluded from KV transfer or prefix caching by vLLM"
    return ""


def _pages_coincide(kv_cache_config: KVCacheConfig) -> bool:
    """Whether any two layers use either the same bytes of a block, or no byte in common."""
    end = 0
    for start, stop in sorted(versions.page_ranges(kv_cache_config)):
        if start < end:
            return False
        end = stop
    return True
