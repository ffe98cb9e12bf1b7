"""Pieces of a pool: where they begin, what is left of a failure, and what is seen meanwhile. CUDA itself: gpu_check."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import attrs
import pytest

from kvledger.storage.kv.errors import PinningFailed
from kvledger.storage.kv.pinning import PIECE_BYTES, pin_in_pieces, slots_a_piece

PAGE = mmap.PAGESIZE
START = 7 * PAGE


@attrs.define
class Driver:
    """As CUDA: memory that has a page in common with what is locked is refused, and so is all from `limit` bytes on."""

    limit: int
    locked: dict[int, int] = attrs.Factory(dict)
    told: list[tuple[int, int, int]] = attrs.Factory(list)

    def lock(self, address: int, size: int) -> int:
        """CUDA's error code: 2 is out of memory, 712 locked already."""
        pages = set(range(address // PAGE, -(-(address + size) // PAGE)))
        if any(pages & set(range(a // PAGE, -(-(a + n) // PAGE))) for a, n in self.locked.items()):
            return 712
        if sum(self.locked.values()) + size > self.limit:
            return 2
        self.locked[address] = size
        return 0

    def pin(self, num_bytes: int, piece_bytes: int) -> Callable[[], None]:
        """Lock that much."""
        return pin_in_pieces(
            START,
            num_bytes,
            piece_bytes,
            lock=self.lock,
            unlock=self.locked.pop,
            progress=lambda *done: self.told.append(done),
        )


@pytest.mark.parametrize("slot_bytes", [48, 4096, 6000, 2 << 20, 320 * 1024 + 16, 3 << 30])
def test_pieces_are_whole_slots_and_whole_pages_of_about_a_gibibyte(slot_bytes: int) -> None:
    """One slot may be larger."""
    size = slots_a_piece(slot_bytes) * slot_bytes
    assert size % PAGE == 0
    assert PIECE_BYTES // 2 < size <= max(PIECE_BYTES, slot_bytes * PAGE)


def test_all_of_it_is_locked_and_unlocked_and_each_piece_is_told() -> None:
    """The last piece is what is left, and may end within a page."""
    driver = Driver(limit=100 * PAGE)
    unpin = driver.pin(5 * PAGE + 48, 2 * PAGE)
    assert driver.locked == {START: 2 * PAGE, START + 2 * PAGE: 2 * PAGE, START + 4 * PAGE: PAGE + 48}
    total = 5 * PAGE + 48
    assert driver.told == [(0, 2 * PAGE, total), (2 * PAGE, 4 * PAGE, total), (4 * PAGE, total, total)]
    unpin()
    assert not driver.locked


def test_where_a_piece_is_refused_nothing_stays_locked_and_the_message_says_how_to_go_on() -> None:
    """With how far it came."""
    driver = Driver(limit=4 * PAGE)
    with pytest.raises(PinningFailed, match="CUDA error 2") as refusal:
        driver.pin(6 * PAGE, 2 * PAGE)
    assert not driver.locked
    assert f"{2 * PAGE} bytes after {4 * PAGE} of {6 * PAGE}" in str(refusal.value)
    assert "lower host_bytes" in str(refusal.value)
