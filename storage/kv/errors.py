"""Everything that `kvledger.storage.kv` refuses, and why.

Each message names the input, the reason and the remedy. A refusal is always raised before any byte has moved.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "BlockOutOfRange",
    "DuplicateDestination",
    "EngineClosed",
    "LayoutUnsupported",
    "PinningFailed",
    "PoolClosed",
    "PoolMismatch",
    "PoolTooSmall",
    "SlotOutOfRange",
    "StorageError",
    "UnequalLengths",
]


class StorageError(Exception):
    """Base of every refusal in this room."""


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

    @classmethod
    def for_memory(cls, num_bytes: int, num_usable_bytes: int, limit: str) -> PoolTooSmall:
        """Fewer bytes can be had than asked for."""
        return cls(
            f"a host pool of {num_bytes} bytes cannot be had, {num_usable_bytes} bytes can ({limit}; a twentieth, at "
            "most 1 GiB, is left to the engine); lower host_bytes, or give the process more memory"
        )


class PinningFailed(StorageError):
    """CUDA would not page-lock the pool."""


class PoolClosed(StorageError):
    """The pool's memory was given back."""


class PoolMismatch(StorageError):
    """The pool was cut for another layout."""


class EngineClosed(StorageError):
    """The copy engine was closed."""


class BlockOutOfRange(StorageError):
    """A block id the layout does not have."""

    @classmethod
    def for_ids(cls, outside: Iterable[int], num_blocks: int) -> BlockOutOfRange:
        """Name the ids that are outside and the range that is not."""
        return cls(
            f"block ids {_some(outside)} are outside 0..{num_blocks - 1}; pass ids of this layout's {num_blocks} blocks"
        )


class SlotOutOfRange(StorageError):
    """A slot the pool does not have."""

    @classmethod
    def for_slots(cls, outside: Iterable[int], num_slots: int) -> SlotOutOfRange:
        """Name the slots that are outside and the range that is not."""
        return cls(f"slots {_some(outside)} are outside 0..{num_slots - 1}; pass slots of this pool's {num_slots}")


class UnequalLengths(StorageError):
    """Blocks and slots do not pair up."""

    @classmethod
    def for_counts(cls, num_block_ids: int, num_slots: int) -> UnequalLengths:
        """Name both counts."""
        return cls(f"{num_block_ids} block ids cannot be paired with {num_slots} slots; pass one slot for each block")


class DuplicateDestination(StorageError):
    """Two pages would be written to the same place, and the winner would be left to chance."""

    @classmethod
    def for_destinations(cls, kind: str, repeated: Iterable[int]) -> DuplicateDestination:
        """Name the destinations that appear more than once."""
        return cls(f"{kind} {_some(repeated)} appear more than once as a destination; write each of them once a call")


def _some(values: Iterable[int], limit: int = 8) -> str:
    shown = list(values)
    more = f" and {len(shown) - limit} more" if len(shown) > limit else ""
    return f"{shown[:limit]}{more}"
