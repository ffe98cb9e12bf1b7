"""Host memory that the processes of one machine have together, in a file that has no name.

The first of them makes the file (`memfd_create`) and sends the others the path at which the kernel shows it while it is
open, `/proc/PID/fd/N`; they map it from there. What has no name cannot be left behind: the memory is free when the last
process that has it ends, however it ends, and no other engine can take it for its own. It does not lie in /dev/shm,
whose size containers limit.

It knows processes and bytes, no vLLM.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable

import attrs
import torch

from kvledger.storage.kv.errors import MemoryNotShared, PoolTooSmall, StorageError
from kvledger.storage.kv.host_memory import refuse_unavailable

__all__ = ["SharedFile", "SharedMemory", "Sharing"]


@attrs.frozen
class SharedFile:
    """Where the first process has made it; or why there is none."""

    path: str
    num_bytes: int
    error: str = ""


@attrs.frozen
class Sharing:
    """The processes that have a memory together, and which of them writes what. Each has one with its own `rank`."""

    rank: int
    num_ranks: int
    from_first: Callable[[SharedFile | None], SharedFile]
    """Called once by each rank, returns to all what rank 0 has called it with."""

    def writes(self, slot: int) -> bool:
        """Whether this rank writes the slot. All of them hold the same pages, and each slot has one that writes it."""
        return slot % self.num_ranks == self.rank


class SharedMemory:
    """`num_bytes` zeroed bytes; `memory` is the same in all processes. Each touches it, so that its start pays for it.

    Raises:
        PoolTooSmall: to the first process, where the machine does not have the memory.
        MemoryNotShared: to another one, where the first has not made it, made another one, or does not let it in.
    """

    def __init__(self, num_bytes: int, sharing: Sharing) -> None:
        self._close: weakref.finalize[..., SharedMemory] | None = None
        self.memory = self._made(num_bytes, sharing) if sharing.rank == 0 else _joined(num_bytes, sharing)

    def close(self) -> None:
        """Let nobody else in. The memory lasts as long as a tensor over it does, in any process."""
        if self._close is not None:
            self._close()

    def _made(self, num_bytes: int, sharing: Sharing) -> torch.Tensor:
        try:
            refuse_unavailable(num_bytes)
            file = os.memfd_create("kvledger")
            self._close = weakref.finalize(self, os.close, file)  # open for as long as others may come
            os.posix_fallocate(file, 0, num_bytes)  # or the lack of a page would be a signal, at its first use
            memory = _mapped(file, num_bytes)
        except (StorageError, OSError) as error:
            self.close()
            sharing.from_first(SharedFile("", num_bytes, str(error)))
            if isinstance(error, StorageError):
                raise
            raise PoolTooSmall(
                f"{num_bytes} bytes of memory for all ranks cannot be had ({error}); lower host_bytes"
            ) from error
        sharing.from_first(SharedFile(f"/proc/{os.getpid()}/fd/{file}", num_bytes))
        return memory


def _joined(num_bytes: int, sharing: Sharing) -> torch.Tensor:
    shared = sharing.from_first(None)
    if shared.error:
        raise MemoryNotShared(f"rank 0 has made no memory for all ranks: {shared.error}")
    if shared.num_bytes != num_bytes:
        raise MemoryNotShared(
            f"rank 0 has made {shared.num_bytes} bytes for all ranks, and {num_bytes} are needed here: start all "
            "processes of the engine with the same versions and the same configuration"
        )
    try:
        file = os.open(shared.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise MemoryNotShared(
            f"the memory that rank 0 has made for all ranks cannot be opened here ({error}); let all worker processes "
            "of the machine run as one user, in one container, or let each rank have a pool of its own"
        ) from error
    try:
        if os.fstat(file).st_size != num_bytes:
            raise MemoryNotShared(f"{shared.path} is not what rank 0 has made for all ranks: its process has ended")
        return _mapped(file, num_bytes)
    finally:
        os.close(file)


def _mapped(file: int, num_bytes: int) -> torch.Tensor:
    # The tensor keeps the mapping. To populate it costs its start a tenth of a second a GiB, and no request a fault.
    mapping = mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(mapping, dtype=torch.uint8)
