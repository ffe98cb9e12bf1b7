"""Pins (page-locks) a pool for CUDA piece by piece.

The caller can therefore log the progress of a long start. If a piece fails, the pieces before it are unpinned. Each
piece begins at a slot, because a transfer must not cross pieces. Each piece also begins at a memory page, because no
memory page may be in two pieces. This module must not know CUDA, so the caller passes the functions `lock` and
`unlock`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable

from kvledger.storage.kv.errors import PinningFailed

__all__ = ["PIECE_BYTES", "pin_in_pieces", "slots_a_piece"]

PIECE_BYTES = 1 << 30
"""Approximate size of a piece. It is so large that the cost of a call does not matter, and so small that progress
messages come regularly."""


def slots_a_piece(slot_bytes: int) -> int:
    """Return the number of slots per piece. A piece has about `PIECE_BYTES`, and a whole number of memory pages."""
    in_pages = math.lcm(slot_bytes, mmap.PAGESIZE) // slot_bytes
    return in_pages * max(1, PIECE_BYTES // (in_pages * slot_bytes))


def pin_in_pieces(
    address: int,
    num_bytes: int,
    piece_bytes: int,
    *,
    lock: Callable[[int, int], int],
    unlock: Callable[[int], object],
    progress: Callable[[int, int, int], object],
) -> Callable[[], None]:
    """Lock memory piece by piece. Return a function that unlocks all of the memory.

    Args:
        address: Start of the memory, at a memory page.
        num_bytes: Size of the memory. The last piece may be smaller than the others.
        piece_bytes: Size of a piece. It must be a whole number of slots and of memory pages.
        lock: `lock(address, num_bytes)` locks one piece and returns CUDA's error code; 0: no error.
        unlock: `unlock(address)` unlocks the piece that begins at `address`.
        progress: Called after each piece with three numbers: the bytes that were locked before this piece, the bytes
            that are locked now, and `num_bytes`.

    Raises:
        PinningFailed: A piece could not be locked. All pieces that were locked before are unlocked again.
    """
    pieces = [(address + start, min(piece_bytes, num_bytes - start)) for start in range(0, num_bytes, piece_bytes)]
    locked: list[int] = []

    def unlock_all() -> None:
        while locked:
            unlock(locked.pop())

    for piece_address, size in pieces:
        try:
            code = lock(piece_address, size)
        except BaseException:
            unlock_all()
            raise
        if code != 0:
            done = piece_address - address
            unlock_all()
            raise PinningFailed(
                f"cudaHostRegister failed with CUDA error {code} for {size} bytes after {done} of {num_bytes} bytes "
                "were pinned, so all bytes were unpinned again; lower host_bytes, raise the locked-memory limit "
                "(ulimit -l) or the memory limit of the control group, or pass pin=False for slower copies"
            )
        locked.append(piece_address)
        progress(piece_address - address, piece_address - address + size, num_bytes)
    return unlock_all
