"""The port for copies that run beside the caller's work, and the choice of who does them.

A synchronous copy stops the model until the bytes are in place; a started one lets it go on with other blocks. The
price is an obligation: **until a copy is done, its source must not be written and its destination must not be used.**
Engines know block ids, slots and tensors; they must not know requests, chunks, tokens or any vLLM class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvledger.storage.kv.engine import CopyResult, no_engine_for
from kvledger.storage.kv.layout import BlockLayout
from kvledger.storage.kv.pool import HostPool

__all__ = ["OverlappingCopyEngine", "PendingCopy", "make_overlapping_engine"]


class PendingCopy(Protocol):
    """A copy that was started. Letting go of this object does not stop it."""

    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once. Never blocks and never raises: a failed copy is done."""

    def wait(self) -> CopyResult:
        """Block until the bytes are in place. May be called again, and then says the same.

        Raises:
            Exception: Whatever stopped the copy, as the synchronous call would have raised it.
        """


class OverlappingCopyEngine(Protocol):
    """Starts copies of whole blocks; the n-th block id goes with the n-th slot.

    What a `CopyEngine` refuses (`UnequalLengths`, `BlockOutOfRange`, `SlotOutOfRange`, `DuplicateDestination`,
    `EngineClosed`, `PoolClosed`) is refused by the `start_*` call itself, before anything has moved. What fails later
    is raised by `wait`. The lists are read during the call: the caller may reuse them.

    Copies of one direction finish in the order in which they were started. Between the two directions there is no
    order: who loads a slot that is being saved waits for the save first. One engine serves one thread.
    """

    def start_save(self, block_ids: Sequence[int], slots: Sequence[int]) -> PendingCopy:
        """Begin to copy device blocks into host slots, after all that the device was given before this call."""

    def start_load(self, slots: Sequence[int], block_ids: Sequence[int]) -> PendingCopy:
        """Begin to copy host slots into device blocks, after all that the device was given before this call."""

    def close(self) -> None:
        """Wait for what is pending, then let go of the tensors and the pool, closing neither. Twice is harmless."""


def make_overlapping_engine(layout: BlockLayout, pool: HostPool) -> OverlappingCopyEngine:
    """The engine for the device that the layout's tensors lie on.

    Raises:
        PoolMismatch: The pool's slots are not of the layout's block size.
        LayoutUnsupported: No engine is written for that device.
    """
    # Imported here because the engines import the port, and CUDA's are of no use without CUDA.
    if layout.device.type == "cpu":
        from kvledger.storage.kv.cpu_overlapping import OverlappingCpuEngine  # noqa: PLC0415

        return OverlappingCpuEngine(layout, pool)
    if layout.device.type == "cuda":
        from kvledger.storage.kv.cuda_engine import OverlappingCudaEngine  # noqa: PLC0415

        return OverlappingCudaEngine(layout, pool)
    raise no_engine_for(layout, "OverlappingCopyEngine")
