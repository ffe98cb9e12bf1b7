"""Host memory that the processes of one machine share, in a file without a name.

Rank 0 creates the file (`memfd_create`) and sends the path `/proc/PID/fd/N` to the other ranks, which map the file.
Because the file has no name, the kernel frees the memory when the last process that uses it ends, whatever the reason.
No other engine can open the file by mistake. The file is not in /dev/shm, because containers limit the size of that
directory.

This module must not know vLLM.
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
    """The path and the size of the file that rank 0 has created. With `error`, rank 0 could not create the file."""

    path: str
    num_bytes: int
    error: str = ""


@attrs.frozen
class Sharing:
    """Describes how the worker processes of a machine share memory. Each process has its own `rank`."""

    rank: int
    num_ranks: int
    from_first: Callable[[SharedFile | None], SharedFile]
    """Each rank calls this function once. On every rank, it returns the argument with which rank 0 called it."""

    def writes(self, slot: int) -> bool:
        """Whether this rank writes `slot`. All ranks have the same KV, so only one of them writes each slot."""
        return slot % self.num_ranks == self.rank


class SharedMemory:
    """`num_bytes` bytes of zeroed memory that all ranks share.

    `memory` has the same bytes in all processes. The constructor touches every memory page, so that page faults do not
    delay requests.

    Raises:
        PoolTooSmall: On rank 0, if the machine does not have the memory.
        MemoryNotShared: On another rank, if rank 0 failed or ended, if the file of rank 0 has another size, or if the
            file cannot be opened.
    """

    def __init__(self, num_bytes: int, sharing: Sharing) -> None:
        self._close: weakref.finalize[..., SharedMemory] | None = None
        self.memory = self._made(num_bytes, sharing) if sharing.rank == 0 else _joined(num_bytes, sharing)

    def close(self) -> None:
        """Close the file, so that no further process can map it.

        The memory is freed when no process has a tensor on it any more.
        """
        if self._close is not None:
            self._close()

    def _made(self, num_bytes: int, sharing: Sharing) -> torch.Tensor:
        try:
            refuse_unavailable(num_bytes)
            file = os.memfd_create("kvledger")
            self._close = weakref.finalize(self, os.close, file)  # open while others may still map it
            os.posix_fallocate(file, 0, num_bytes)  # otherwise a missing page would be a signal at first use
            memory = _mapped(file, num_bytes)
        except (StorageError, OSError) as error:
            self.close()
            sharing.from_first(SharedFile("", num_bytes, str(error)))
            if isinstance(error, StorageError):
                raise
            raise PoolTooSmall(
                f"{num_bytes} bytes of memory for all ranks cannot be allocated ({error}); lower host_bytes"
            ) from error
        sharing.from_first(SharedFile(f"/proc/{os.getpid()}/fd/{file}", num_bytes))
        return memory


def _joined(num_bytes: int, sharing: Sharing) -> torch.Tensor:
    shared = sharing.from_first(None)
    if shared.error:
        raise MemoryNotShared(f"rank 0 could not create the memory that all ranks share: {shared.error}")
    if shared.num_bytes != num_bytes:
        raise MemoryNotShared(
            f"rank 0 created {shared.num_bytes} bytes for all ranks, but {num_bytes} are needed here; start all "
            "processes of the engine with the same versions and the same configuration"
        )
    try:
        file = os.open(shared.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise MemoryNotShared(
            f"the memory that rank 0 created for all ranks cannot be opened here ({error}); run all worker processes "
            "of the machine as one user, in one container, or give each rank its own pool (share_pool)"
        ) from error
    try:
        if os.fstat(file).st_size != num_bytes:
            raise MemoryNotShared(
                f"{shared.path} is not the memory that rank 0 created for all ranks: the process of rank 0 has ended"
            )
        return _mapped(file, num_bytes)
    finally:
        os.close(file)


def _mapped(file: int, num_bytes: int) -> torch.Tensor:
    # The tensor keeps the mapping. Populating it takes the start 0.1 s per GiB and saves requests the page faults.
    mapping = mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(mapping, dtype=torch.uint8)
