"""The user's choice of the connector and the options with which a recorder's log is run again.

A log may come from a stranger. The module and class that it names are code on the user's machine, and an option can
be a path, an address or the name of more code. A rerun therefore runs only a connector that the user names or accepts,
and takes from the log only options that are known to be harmless. This module does not depend on vLLM.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from kvledger.adapters.lab.repro.recording import NotRerunnable
from kvledger.adapters.tools.logs.visible import shortened, visible

HARMLESS_OPTIONS = frozenset(
    {
        # kvledger's own connector (adapters/vllm/configuration.py), except its logs and code
        "chunk_size",
        "host_bytes",
        "keep_for_preempted",
        "kv_cache_layout",
        "load_mode",
        "max_deferred_lookups",
        "max_failed_loads",
        "max_silent_ms",
        "max_silent_steps",
        "offer",
        "save_interval_tokens",
        "save_mode",
        "save_tails",
        "share_pool",
        # OffloadingConnector and SimpleCPUOffloadConnector (v1/kv_offload, v1/simple_kv_offload, vLLM 0.32)
        "block_size",
        "blocks_per_chunk",
        "cpu_bytes_to_use",
        "cpu_bytes_to_use_per_rank",
        "enable_cross_layers_blocks",
        "eviction_policy",
        "lazy_offload",
        "max_tracker_size",
        "offload_prompt_only",
        "store_threshold",
        # DecodeBenchConnector
        "fill_mean",
        "fill_std",
    }
)
"""Options that a rerun takes from a log, if the value is null, a boolean, a number, a size or one of `_WORDS`."""
_WORDS = frozenset({"always", "arc", "async", "auto", "BLHNC", "BLNHC", "lru", "sync"})
_SIZE = re.compile(r"[0-9]{1,15}(\.[0-9]{1,6})?\s?([KMGTP]i?)?B", re.IGNORECASE)
_MAX_NUMBER = 1 << 53
_ROLES = ("kv_both", "kv_producer", "kv_consumer")
_POLICIES = ("fail", "recompute")
_MAX_DEPTH = 3
"""Levels of connectors within `MultiConnector` that are read."""
_MAX_NAME = 200
_MAX_NAMED = 10
_IN_PYTHON = ('connector="module:Class"', "run_recorded=True")


@attrs.frozen
class Chosen:
    """The connector and options that the user chose for a recorder's log. Without a choice, no connector is run."""

    connector: str = ""
    """The connector as "module:Class" or as a name in vLLM's registry; empty if the user named none."""
    extra_config: Mapping[str, Any] = attrs.field(factory=dict)
    """Key → value of the connector's `kv_connector_extra_config`. Values given here override values in the log."""
    run_recorded: bool = False
    """Whether to run the module and class that the log names for a connector, and for each child of a connector."""

    @property
    def is_empty(self) -> bool:
        """Whether the user chose nothing."""
        return not (self.connector or self.extra_config or self.run_recorded)

    def name(self, recorded: Mapping[str, Any]) -> str:
        """Return the class name of the connector to run. `recorded` is the recorded connector's configuration."""
        return self.connector.rpartition(":")[2] if self.connector else name_of(recorded)

    def transfer(self, recorded: Mapping[str, Any], words: tuple[str, str] = _IN_PYTHON) -> dict[str, Any]:
        """Return the `--kv-transfer-config` of the connector to run.

        Args:
            recorded: the `--kv-transfer-config` of the recorded connector, from the log.
            words: two options, as messages write them: one names a connector, the other accepts the log's connector.

        Raises:
            NotRerunnable: the user has not chosen a connector, or has chosen two.
        """
        by_name, by_acceptance = words
        if self.connector and self.run_recorded:
            raise NotRerunnable(f"{by_name} and {by_acceptance} name two connectors; give only one of these options")
        if not self.connector and not self.run_recorded:
            raise NotRerunnable(
                f"the log names {_named(recorded)}, and kvledger does not run code only because a log names it; name "
                f"the connector to run with {by_name}, or accept the connector in the log with {by_acceptance}"
            )
        found = _transfer(recorded, accepts_code=self.run_recorded, depth=0)
        if self.connector:
            module, _, name = self.connector.rpartition(":")
            found |= {"kv_connector": name, "kv_connector_module_path": module or None}
        if not found.get("kv_connector"):
            raise NotRerunnable(f"no connector is named; name one with {by_name}")
        found["kv_connector_extra_config"] |= self.extra_config
        return found

    def left_out(self, recorded: Mapping[str, Any]) -> str:
        """Return the names of recorded options that are not taken from the log and that the user has not given."""
        options = _mapping(recorded.get("kv_connector_extra_config"))
        taken = _options(options, accepts_code=self.run_recorded, depth=0).keys() | self.extra_config.keys()
        names = [_short(str(name)) for name in options if name not in taken]
        return ", ".join(names[:_MAX_NAMED]) + (f" and {len(names) - _MAX_NAMED} more" * bool(names[_MAX_NAMED:]))


def name_of(recorded: Mapping[str, Any]) -> str:
    """Return, as text for messages, the class name of the connector that a log names."""
    name = recorded.get("kv_connector")
    return _short(name) if isinstance(name, str) and name else "an unnamed connector"


def _named(recorded: Mapping[str, Any]) -> str:
    every = [
        f"{_short(module)}:{name_of(each)}" if isinstance(module, str) and module else name_of(each)
        for each in _connectors(recorded, 0)
        for module in [each.get("kv_connector_module_path")]
    ]
    more = f" and {len(every) - _MAX_NAMED} more" if every[_MAX_NAMED:] else ""
    return f"the connector{'s' * (len(every) > 1)} {', '.join(every[:_MAX_NAMED])}{more}"


def _connectors(recorded: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
    yield recorded
    for child in _children(_mapping(recorded.get("kv_connector_extra_config")), depth):
        yield from _connectors(child, depth + 1)


def _children(options: Mapping[str, Any], depth: int) -> list[Mapping[str, Any]]:
    children = options.get("connectors")
    if depth >= _MAX_DEPTH or not isinstance(children, list):
        return []
    return [child for child in children if isinstance(child, Mapping)]


def _transfer(recorded: Mapping[str, Any], *, accepts_code: bool, depth: int) -> dict[str, Any]:
    options = _options(_mapping(recorded.get("kv_connector_extra_config")), accepts_code=accepts_code, depth=depth)
    found: dict[str, Any] = {"kv_role": _ROLES[0], "kv_connector_extra_config": options}
    for key, allowed in (("kv_role", _ROLES), ("kv_load_failure_policy", _POLICIES)):
        if recorded.get(key) in allowed:
            found[key] = recorded[key]
    if accepts_code:
        for key in ("kv_connector", "kv_connector_module_path"):
            if isinstance(recorded.get(key), str):
                found[key] = recorded[key]
    return found


def _options(options: Mapping[str, Any], *, accepts_code: bool, depth: int) -> dict[str, Any]:
    found = {name: value for name, value in options.items() if name in HARMLESS_OPTIONS and _is_harmless(value)}
    children = _children(options, depth)
    if accepts_code and children:
        found["connectors"] = [_transfer(child, accepts_code=True, depth=depth + 1) for child in children]
    return found


def _is_harmless(value: object) -> bool:
    match value:
        case None | bool():
            return True
        case int():
            return abs(value) < _MAX_NUMBER
        case float():
            return math.isfinite(value)
        case str():
            return value in _WORDS or bool(_SIZE.fullmatch(value))
    return False


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _short(text: str) -> str:
    return shortened(visible(text), _MAX_NAME)
