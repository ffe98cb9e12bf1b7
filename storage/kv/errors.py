"""The errors of `kvledger.storage.kv`. All of them are raised before any byte is copied.

Each message names the input, the reason and the remedy.
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
    """Base class of this package's errors."""


class LayoutUnsupported(StorageError):
    """The pages of a KV tensor cannot be described, or not without guessing."""


class PoolTooSmall(StorageError):
    """The configured host memory does not hold one slot, or the machine does not have that much memory."""

    @classmethod
    def for_budget(cls, host_bytes: int, slot_bytes: int) -> PoolTooSmall:
        """Return the error for a budget that is smaller than one slot."""
        return cls(
            f"host_bytes={host_bytes} does not hold one slot: a slot is {slot_bytes} bytes (one block over all "
            f"layers), so at least {max(slot_bytes, 1)} bytes are needed; raise host_bytes, or offload smaller blocks"
        )


class MemoryNotShared(StorageError):
    """This process cannot access the memory that several processes share."""


class PinningFailed(StorageError):
    """CUDA did not pin the pool."""


class PoolClosed(StorageError):
    """The pool was closed."""


class PoolMismatch(StorageError):
    """The pool's slots do not have the size of the layout's blocks."""


class EngineClosed(StorageError):
    """The copy engine was closed."""


class CopyRefused(StorageError):
    """Blocks and slots do not pair up or do not exist, or a destination would be written twice."""
