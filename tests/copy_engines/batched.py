"""vLLM's batched copy, where this Python has a vLLM that has it, or its library of operators alone."""

from __future__ import annotations

import os

import torch

from kvledger.storage.kv import BatchedCopy

LIBRARY = "KVLEDGER_VLLM_LIBRARY"
"""Environment variable: vLLM's `_C_stable_libtorch.abi3.so`, for a Python that has torch and no vLLM."""


def find_batched_copy() -> BatchedCopy | None:
    """None where vLLM, or what the adapter needs beside it, is not installed, or where it was built without."""
    if library := os.environ.get(LIBRARY):
        torch.ops.load_library(library)
        operator: BatchedCopy = torch.ops._C_cache_ops.swap_blocks_batch
        return operator
    try:
        from kvledger.adapters.vllm.versions import batched_copy
    except ModuleNotFoundError:
        return None
    return batched_copy()
