"""vLLM's batched copy, where this Python has a vLLM that has it."""

from __future__ import annotations

from kvledger.storage.kv import BatchedCopy


def find_batched_copy() -> BatchedCopy | None:
    """None where vLLM, or what the adapter needs beside it, is not installed, or where it was built without."""
    try:
        from kvledger.adapters.vllm.versions import batched_copy
    except ModuleNotFoundError:
        return None
    return batched_copy()
