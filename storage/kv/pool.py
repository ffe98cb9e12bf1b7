"""The host memory that KV blocks are kept in: one allocation, cut into equal slots.

A slot holds one block over all layers. The pool knows neither which block a slot holds nor whether it is free; whoever
hands out slots does.
"""

from __future__ import annotations

import weakref

import torch

from kvledger.storage.kv.errors import PinningFailed, PoolClosed, PoolTooSmall
from kvledger.storage.kv.host_memory import available_memory

__all__ = ["HostPool", "num_slots_for"]

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context of the process.


def num_slots_for(host_bytes: int, slot_bytes: int) -> int:
    """How many slots of `slot_bytes` fit into `host_bytes`; `PoolTooSmall` if not one does."""
    if slot_bytes < 1 or host_bytes < slot_bytes:
        raise PoolTooSmall.for_budget(host_bytes, slot_bytes)
    return host_bytes // slot_bytes


class HostPool:
    """`num_slots` slots of `slot_bytes` bytes each, in one allocation that `close()` gives back.

    Every page of the memory is touched here, so that the start pays for it and not the first requests. Before the first
    one is, the memory that can be had is asked for: the kernel would kill the process without a word.

    Args:
        num_slots: At least 1.
        slot_bytes: Bytes of a slot, `BlockLayout.block_bytes`.
        pin: Page-lock the memory for CUDA. Without CUDA this asks for nothing and `is_pinned` stays False.

    Raises:
        PoolTooSmall: No slot, or the machine does not have the memory.
        PinningFailed: CUDA is there and refused to page-lock the memory.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, pin: bool) -> None:
        if num_slots < 1 or slot_bytes < 1:
            raise PoolTooSmall.for_budget(max(num_slots, 0) * max(slot_bytes, 0), slot_bytes)
        memory = available_memory()
        if memory is not None and num_slots * slot_bytes > memory.num_usable_bytes:
            raise PoolTooSmall(
                f"a host pool of {num_slots * slot_bytes} bytes cannot be had, {memory.num_usable_bytes} bytes can "
                f"({memory.limit}; a twentieth, at most 1 GiB, is left to the engine); lower host_bytes, or give the "
                "process more memory"
            )
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.is_pinned = False
        self._unpin: weakref.finalize[..., HostPool] | None = None
        try:
            self._buffer: torch.Tensor | None = torch.zeros((num_slots, slot_bytes), dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise PoolTooSmall(
                f"{num_slots} slots of {slot_bytes} bytes are {num_slots * slot_bytes} bytes, which this machine would "
                f"not allocate ({error}); lower host_bytes"
            ) from error
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

    def _pin(self, buffer: torch.Tensor) -> None:
        # torch's pin_memory() rounds up to a power of two, nearly twice the memory in the worst case: register instead.
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(cudart.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, _PORTABLE))
        if code != 0:
            raise PinningFailed(
                f"cudaHostRegister of {buffer.nbytes} bytes failed with CUDA error {code}; raise the locked-memory "
                "limit (ulimit -l), lower host_bytes, or pass pin=False for slower copies"
            )
        self.is_pinned = True
        # Holds the address alone and runs when a forgotten pool is collected; at exit the driver cleans up.
        self._unpin = weakref.finalize(self, cudart.cudaHostUnregister, buffer.data_ptr())
        self._unpin.atexit = False
