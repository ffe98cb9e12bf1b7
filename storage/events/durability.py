"""What an acknowledged append has survived, by name."""

from __future__ import annotations

import enum

__all__ = ["Durability"]


class Durability(enum.StrEnum):
    """What a frame outlives once `append` has returned."""

    MEMORY = "memory"
    """Nothing: the frame is gone with the process. Only `MemoryEventStore` offers it."""
    OS = "os"
    """The process, also when it is killed. A power cut loses what the kernel had not yet written back."""
    DISK = "disk"
    """The machine, once the next grouped `fdatasync` is through; `flush` waits for one."""
