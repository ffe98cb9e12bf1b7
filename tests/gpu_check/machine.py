"""The device that is looked at, what is done at which size, and how it is kept busy and asked for the time.

On CPU tensors nothing is queued: a clock stands in for the device's events, and an engine is held back by its thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import torch

from kvledger.storage.kv import CopyEngine, available_memory

MIB, GIB = 1 << 20, 1 << 30


@attrs.frozen
class Machine:
    """A device and the sizes that suit it."""

    device: torch.device
    race_bytes: int = 512 * MIB
    """More than an engine stages at once: its first part alone could be read before it is overwritten."""
    num_steps: int = 200
    moved_bytes: int = 512 * MIB
    rounds: int = 9
    pool_bytes: int = 100 * GIB
    matrix: int = 8192
    """Rows of the matrices whose product stands for a forward: some milliseconds on a large GPU."""

    @classmethod
    def rehearsal(cls) -> Machine:
        """CPU tensors, all as small as it can be."""
        return cls(torch.device("cpu"), MIB, 20, MIB, 1, 8 * MIB, 64)

    @property
    def is_cuda(self) -> bool:
        """Whether there is a device at all."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def keep_busy(self) -> None:
        """Give the current stream some 50 ms of work; nothing on CPU."""
        if self.is_cuda:
            left = torch.full((8192, 8192), 1e-4, device=self.device)
            for _ in range(4):
                left = left @ left

    @contextmanager
    def held_back(self, engine: CopyEngine) -> Iterator[Callable[[], None]]:
        """Within it, a copy that `engine` starts is pending, until the function that is given is called."""
        if self.is_cuda:
            self.keep_busy()
            yield lambda: None
            return
        gate = threading.Event()
        engine._thread.submit(gate.wait)  # type: ignore[attr-defined]
        try:
            yield gate.set
        finally:
            gate.set()

    def mark(self) -> Mark:
        """A moment of the current stream."""
        return Mark(self.is_cuda)

    def memory_taken(self) -> int:
        """Bytes of the device that are in use, by whomever."""
        if not self.is_cuda:
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)

    def pool_size(self, slot_bytes: int) -> int:
        """How many slots the large pool has: what is asked for, or nine tenths of what the machine has."""
        memory = available_memory()
        usable = self.pool_bytes if memory is None else min(self.pool_bytes, memory.num_usable_bytes * 9 // 10)
        return usable // slot_bytes


class Mark:
    """A moment: when the stream came by, or on CPU when it was made."""

    def __init__(self, is_cuda: bool) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if is_cuda else None
        self._at_ns = time.perf_counter_ns()
        if self._event is not None:
            self._event.record()

    def until_ms(self, later: Mark) -> float:
        """Milliseconds from here to `later`; both must be over."""
        if self._event is not None:
            return float(self._event.elapsed_time(later._event))
        return (later._at_ns - self._at_ns) / 1e6
