"""The host memory that KV blocks are kept in: one allocation, cut into equal slots.

A slot holds one block over all layers. The pool knows neither which block a slot holds nor whether it is free; whoever
hands out slots does.
"""

from __future__ import annotations

import logging
import mmap
import weakref

import torch

from kvledger.storage.kv.errors import PoolClosed, PoolTooSmall
from kvledger.storage.kv.host_memory import refuse_unavailable
from kvledger.storage.kv.pinning import pin_in_pieces, slots_a_piece
from kvledger.storage.kv.shared_memory import SharedMemory, Sharing

__all__ = ["HostPool"]

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context of the process.
_BYTES_A_MESSAGE = 16 << 30
"""Some seconds."""

_messages = logging.getLogger("vllm.kvledger")


class HostPool:
    """`num_slots` slots of `slot_bytes` bytes each, in one allocation that `close()` gives back.

    Every page of the memory is touched here, so that the start pays for it and not the first requests. Before the first
    one is, the memory that can be had is asked for: the kernel would kill the process without a word.

    Args:
        num_slots: At least 1.
        slot_bytes: Bytes of a slot, `BlockLayout.block_bytes`.
        pin: Page-lock the memory for CUDA. Without CUDA this asks for nothing and `is_pinned` stays False.
        sharing: The processes that have this pool together, each with an object of this class over the same memory.

    Raises:
        PoolTooSmall: No slot, or the machine does not have the memory.
        MemoryNotShared: See `SharedMemory`.
        PinningFailed: CUDA is there and refused to page-lock the memory.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, pin: bool, sharing: Sharing | None = None) -> None:
        if num_slots < 1 or slot_bytes < 1:
            raise PoolTooSmall.for_budget(max(num_slots, 0) * max(slot_bytes, 0), slot_bytes)
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.slots_a_piece = slots_a_piece(slot_bytes)
        """A transfer must not go from one slot to the next where the next one's number is a multiple of this."""
        self.is_pinned = False
        """Whether CUDA has page-locked the memory. torch 2.11's `Tensor.is_pinned` is False for registered memory."""
        self._unpin: weakref.finalize[..., HostPool] | None = None
        self._shared = None if sharing is None else SharedMemory(num_slots * slot_bytes, sharing)
        memory = _own_memory(num_slots * slot_bytes) if self._shared is None else self._shared.memory
        self._buffer: torch.Tensor | None = memory.view(num_slots, slot_bytes)
        if pin and torch.cuda.is_available():
            self._pin(self._buffer)

    @property
    def buffer(self) -> torch.Tensor:
        """The slots, uint8 `[num_slots, slot_bytes]`; `PoolClosed` after `close()`."""
        if self._buffer is None:
            raise PoolClosed(f"the pool of {self.num_slots} slots was closed; make a new HostPool")
        return self._buffer

    def close(self) -> None:
        """Unpin and drop the memory. Closing twice is harmless. Close the engines that use the pool first."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self.is_pinned = False
        self._buffer = None
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def _pin(self, buffer: torch.Tensor) -> None:
        # torch's pin_memory() rounds up to a power of two, nearly twice the memory in the worst case: register instead.
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        unpin = pin_in_pieces(
            buffer.data_ptr(),
            buffer.nbytes,
            self.slots_a_piece * self.slot_bytes,
            lock=lambda address, size: int(cudart.cudaHostRegister(address, size, _PORTABLE)),
            unlock=cudart.cudaHostUnregister,
            progress=_report,
        )
        self.is_pinned = True
        # Holds addresses alone and runs when a forgotten pool is collected; at exit the driver cleans up.
        self._unpin = weakref.finalize(self, unpin)
        self._unpin.atexit = False


def _own_memory(num_bytes: int) -> torch.Tensor:
    refuse_unavailable(num_bytes)
    try:
        # From a page on, so that pieces can be page-locked.
        memory = torch.zeros(num_bytes + mmap.PAGESIZE, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise PoolTooSmall(
            f"this machine would not allocate {num_bytes} bytes for a host pool ({error}); lower host_bytes"
        ) from error
    return memory[-memory.data_ptr() % mmap.PAGESIZE :][:num_bytes]


def _report(before: int, locked: int, of_bytes: int) -> None:
    if before // _BYTES_A_MESSAGE < locked // _BYTES_A_MESSAGE:
        _messages.info("host pool: %d of %d bytes are page-locked", locked, of_bytes)
