"""The host memory for KV blocks: one allocation, divided into slots of equal size.

A slot holds one page, the KV of one block in one group. This module must not know which page a slot holds, or whether
the slot is free.
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
"""Bytes that are pinned between two log messages. Pinning this much takes some seconds."""

_messages = logging.getLogger("vllm.kvledger")


class HostPool:
    """`num_slots` slots of `slot_bytes` bytes each, in one allocation. `close()` releases the memory.

    The constructor first checks that enough memory is available, because the kernel would kill a process that takes
    more. It then touches the whole allocation, so that page faults occur at the start and do not delay the first
    requests.

    Args:
        num_slots: Number of slots, at least 1.
        slot_bytes: Bytes per slot, the value of `BlockLayout.block_bytes`.
        pin: Whether to pin (page-lock) the memory for CUDA. Without CUDA, nothing is pinned, and `is_pinned` is False.
        sharing: The processes that share the memory of this pool; None: only this process uses the memory. Each process
            creates its own `HostPool` over the shared memory.

    Raises:
        PoolTooSmall: `num_slots` or `slot_bytes` is less than 1, or the machine does not have the memory.
        MemoryNotShared: See `SharedMemory`.
        PinningFailed: CUDA did not pin the memory.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, pin: bool, sharing: Sharing | None = None) -> None:
        if num_slots < 1 or slot_bytes < 1:
            raise PoolTooSmall.for_budget(max(num_slots, 0) * max(slot_bytes, 0), slot_bytes)
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.slots_a_piece = slots_a_piece(slot_bytes)
        """Slots per pinned piece. A piece begins at each multiple of this number. A transfer must not cross pieces."""
        self.is_pinned = False
        """Whether CUDA has pinned the memory. `Tensor.is_pinned` of torch 2.11 does not show this."""
        self._unpin: weakref.finalize[..., HostPool] | None = None
        self._shared = None if sharing is None else SharedMemory(num_slots * slot_bytes, sharing)
        memory = _own_memory(num_slots * slot_bytes) if self._shared is None else self._shared.memory
        self._buffer: torch.Tensor | None = memory.view(num_slots, slot_bytes)
        if pin and torch.cuda.is_available():
            self._pin(self._buffer)

    @property
    def buffer(self) -> torch.Tensor:
        """The slots, uint8 `[num_slots, slot_bytes]`. Raises `PoolClosed` after `close()`."""
        if self._buffer is None:
            raise PoolClosed(f"the pool of {self.num_slots} slots was closed; create a new HostPool")
        return self._buffer

    def close(self) -> None:
        """Unpin and release the memory. First close the copy engines that use the pool. Closing twice is harmless."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self.is_pinned = False
        self._buffer = None
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def _pin(self, buffer: torch.Tensor) -> None:
        # Not torch's pin_memory(): it rounds up to a power of two, so it may take nearly twice the memory.
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
        # Runs if a pool is collected without `close`; the finalizer keeps only addresses. At exit the driver cleans up.
        self._unpin = weakref.finalize(self, unpin)
        self._unpin.atexit = False


def _own_memory(num_bytes: int) -> torch.Tensor:
    refuse_unavailable(num_bytes)
    try:
        # One page more, so that the pool can begin at a page, as pinning requires.
        memory = torch.zeros(num_bytes + mmap.PAGESIZE, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        raise PoolTooSmall(
            f"this machine cannot allocate {num_bytes} bytes for a host pool ({error}); lower host_bytes"
        ) from error
    return memory[-memory.data_ptr() % mmap.PAGESIZE :][:num_bytes]


def _report(before: int, locked: int, of_bytes: int) -> None:
    if before // _BYTES_A_MESSAGE < locked // _BYTES_A_MESSAGE:
        _messages.info("host pool: %d of %d bytes are pinned", locked, of_bytes)
