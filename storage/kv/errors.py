"""Everything that `kvledger.storage.kv` refuses, and why.

Each message names the input, the reason and the remedy. A refusal is always raised before any byte has moved.
"""

from __future__ import annotations

__all__ = [
    "CopyRefused",
    "EngineClosed",
    "LayoutUnsupported",
    "MemoryNotShared",
    "PinningFailed",
    "PoolClosed",
    "PoolMismatch",
    "PoolTooSmall",
    "StorageError",
]


class StorageError(Exception):
    """Base of every refusal of this package."""


class LayoutUnsupported(StorageError):
    """A KV tensor whose pages cannot be described, or cannot be described without guessing."""


class PoolTooSmall(StorageError):
    """The host memory granted does not hold a single slot, or cannot be had from the machine."""

    @classmethod
    def for_budget(cls, host_bytes: int, slot_bytes: int) -> PoolTooSmall:
        """The budget is smaller than one slot."""
        return cls(
            f"host_bytes={host_bytes} does not hold one slot: a slot is {slot_bytes} bytes (one block over all "
            f"layers), so at least {max(slot_bytes, 1)} bytes are needed; raise host_bytes, or offload smaller blocks"
        )


class MemoryNotShared(StorageError):
    """The memory that is for several processes cannot be had in this one."""


class PinningFailed(StorageError):
    """CUDA would not page-lock the pool."""


class PoolClosed(StorageError):
    """The pool's memory was given back."""


class PoolMismatch(StorageError):
    """The pool was cut for another layout."""


class EngineClosed(StorageError):
    """The copy engine was closed."""


class CopyRefused(StorageError):
    """Blocks and slots that do not pair up, are not there, or would be written twice, the winner left to chance."""
