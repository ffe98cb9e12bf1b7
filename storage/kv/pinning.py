"""Pins (page-locks) a pool for CUDA piece by piece, so that a long start can log progress and undo a failure.

Each piece begins at a slot, because a transfer must not cross pieces, and at a memory page, because no page may be in
two pieces. This module knows addresses and sizes. It must not know CUDA: the caller passes `lock` and `unlock`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable

from kvledger.storage.kv.errors import PinningFailed

__all__ = ["PIECE_BYTES", "pin_in_pieces", "slots_a_piece"]

PIECE_BYTES = 1 << 30
"""Large enough that the cost of a call does not matter, and small enough for regular progress messages."""


def slots_a_piece(slot_bytes: int) -> int:
    """Return the number of slots per piece: about `PIECE_BYTES`, and a whole number of pages."""
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
    """Lock memory that begins at a page. Return a function that unlocks it.

    Args:
        address: Start of the memory.
        num_bytes: Size of the memory; the last piece may be smaller than the others.
        piece_bytes: Size of a piece: whole slots and whole pages.
        lock: `lock(address, num_bytes)` returns CUDA's error code, 0 for none.
        unlock: Unlocks the piece that was locked at this address.
        progress: Called after each piece with the bytes locked before it, the bytes locked now, and `num_bytes`.

    Raises:
        PinningFailed: A piece could not be locked. All others were unlocked.
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
                f"cudaHostRegister failed with CUDA error {code} for {size} bytes after {done} of {num_bytes}, which "
                "were unpinned again; lower host_bytes, raise the locked-memory limit (ulimit -l) or that of the "
                "control group, or pass pin=False for slower copies"
            )
        locked.append(piece_address)
        progress(piece_address - address, piece_address - address + size, num_bytes)
    return unlock_all
