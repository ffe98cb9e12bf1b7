"""Which hash algorithms kvledger refuses, and why somebody with a log could guess prompts from its chunk keys.

This module reads vLLM's configuration and `PYTHONHASHSEED`. It must not hash anything.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvledger.adapters.vllm.messages import messages
from kvledger.lifecycle import ConfigurationError, Refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COLLISION_RESISTANT: Final = ("sha256", "sha256_cbor")
"""Values of `prefix_caching_hash_algo` for which nobody can construct two prompts with the same key."""
DEFAULT_ALGORITHM: Final = "sha256"
_NOT_SECRET: Final = ("", "random")
"""Values of `PYTHONHASHSEED` that are not secret. vLLM hashes the value as text, so "random" gives a constant."""
_SMALL: Final = 1 << 16
"""Seeds below this number are not secret: examples use them, and a reader of the log tries them first."""


def hash_algorithm(vllm_config: VllmConfig) -> str:
    """Return the algorithm that vLLM hashes blocks with (`config/cache.py`, prefix_caching_hash_algo, 0.32)."""
    return str(vllm_config.cache_config.prefix_caching_hash_algo)


def refuse_weak_hash(algorithm: str) -> None:
    """Refuse an algorithm for which a client can construct two prompts with the same key.

    Raises:
        ConfigurationError: names the option and the remedy.
    """
    if algorithm not in COLLISION_RESISTANT:
        reason = (
            "is not known to resist crafted collisions; a client could write a prompt that has the key of another "
            "prompt, so that one request gets another tenant's KV"
        )
        remedy = "start vLLM with --prefix-caching-hash-algo sha256, its default, or sha256_cbor"
        raise ConfigurationError(Refusal(reason, remedy, "prefix_caching_hash_algo", algorithm))


def note_guessable_keys(vllm_config: VllmConfig, log_directory: Path | None) -> None:
    """Write a message if somebody who can read the log can guess prompts. The message says why.

    Nobody else can read a log in memory, so there is no message about it. Called at start.
    """
    reason = why_guessable(hash_algorithm(vllm_config))
    if reason and log_directory is not None:
        messages.info("a reader of the log can guess prompts", reason=reason)


def why_guessable(algorithm: str) -> str:
    """Return why somebody with a log can test guesses of prompts, and the remedy; empty if no reason is known.

    vLLM 0.32 and 0.33 compute the start of their hash chains from `PYTHONHASHSEED`. If `PYTHONHASHSEED` is not set,
    the start is a constant with sha256. With xxhash, it is then 32 random bytes, new in each process
    (`v1/core/kv_cache_utils.py`, resolve_none_hash_seed).
    """
    if algorithm not in COLLISION_RESISTANT:
        return f"{algorithm} is not a cryptographic hash, so keys do not hide prompts; use sha256"
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None and seed not in _NOT_SECRET and not _is_small(seed):
        return ""
    what = "is not set" if seed is None else f"is {seed!r}"
    return (
        f"PYTHONHASHSEED {what}, so vLLM's hashes start from a public value: a reader of the log can test whether a "
        f"guessed prompt is in it; set PYTHONHASHSEED to a secret number of at least {_SMALL}, and send a secret "
        "cache_salt for each tenant"
    )


def _is_small(seed: str) -> bool:
    digits = seed.lstrip("0") or "0"
    return digits.isdecimal() and len(digits) <= len(str(_SMALL)) and int(digits) < _SMALL
