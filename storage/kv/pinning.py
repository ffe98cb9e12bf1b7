"""Page-locks a pool for CUDA piece by piece, so that a long start can be seen and one that fails leaves nothing behind.

A transfer may touch one piece only, so pieces begin at slots; and no memory page may be in two of them, so they begin
at pages, too. It knows addresses and sizes. It must not know CUDA: whoever locks and unlocks is handed in.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable

from kvledger.storage.kv.errors import PinningFailed

__all__ = ["PIECE_BYTES", "pin_in_pieces", "slots_a_piece"]

PIECE_BYTES = 1 << 30
"""Long against a call's own cost, short against what a start may take without a word."""


def slots_a_piece(slot_bytes: int) -> int:
    """How many slots are locked at once: about `PIECE_BYTES`, and whole pages."""
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
    """Lock memory that begins at a page; returns what unlocks it again.

    Args:
        address: Where it begins.
        num_bytes: How much there is; the last piece may be smaller.
        piece_bytes: Whole slots and whole pages.
        lock: Locks so many bytes from an address on; returns CUDA's error code, 0 for none.
        unlock: Unlocks what was locked from that address on.
        progress: Told after each piece how many bytes were locked before it, are now, and will be.

    Raises:
        PinningFailed: One of them could not be locked; none is any more.
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
                f"cudaHostRegister failed with CUDA error {code} at {size} bytes behind {done} of {num_bytes}, which "
                "were unlocked again; lower host_bytes, raise the locked-memory limit (ulimit -l) or that of the "
                "control group, or pass pin=False for slower copies"
            )
        locked.append(piece_address)
        progress(piece_address - address, piece_address - address + size, num_bytes)
    return unlock_all
