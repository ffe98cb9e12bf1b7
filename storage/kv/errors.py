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
    """The place of the blocks in a KV tensor cannot be described, or a description would be a guess."""


class PoolTooSmall(StorageError):
    """The configured host memory is smaller than one slot, or the machine does not have the configured memory."""

    @classmethod
    def for_budget(cls, host_bytes: int, slot_bytes: int) -> PoolTooSmall:
        """Return the error for a `host_bytes` that is smaller than one slot."""
        return cls(
            f"host_bytes={host_bytes} is too small for one slot: a slot is {slot_bytes} bytes (one page, the KV "
            f"of one block), so at least {max(slot_bytes, 1)} bytes are needed; raise host_bytes, or use smaller blocks"
        )


class MemoryNotShared(StorageError):
    """This process cannot access the memory that several processes share."""


class PinningFailed(StorageError):
    """CUDA did not pin the pool."""


class PoolClosed(StorageError):
    """The pool was closed."""


class PoolMismatch(StorageError):
    """The size of the pool's slots is not the size of the layout's blocks."""


class EngineClosed(StorageError):
    """The copy engine was closed."""


class CopyRefused(StorageError):
    """The blocks and slots of a copy differ in number or do not exist, or a destination would be written twice."""
