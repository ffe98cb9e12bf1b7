"""The disk under the event log: it takes a while, refuses, or is full, and works again later.

The log is the real one, in a temporary directory; only `os.write` and `os.ftruncate` of the module that writes
segments are stood in for, because no file system that is really full can be had without being root.
"""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

from kvledger.storage.events import segments
from sim.faults.fault import Fault

if TYPE_CHECKING:
    from sim.world import World


class _Disk(Fault):
    """Works, until it does not for some steps."""

    max_steps: tuple[int, ...]
    share: tuple[float, ...]

    def __init__(self, world: World) -> None:
        super().__init__(world)
        world.needs_files = True
        self._share = self.rng.choice(self.share)
        self._broken_until = -1
        self._real = segments.os
        segments.os = SimpleNamespace(**{**vars(os), "write": self._write, "ftruncate": self._truncate})

    @property
    def is_broken(self) -> bool:
        """Whether it refuses right now."""
        return self.world.num_steps < self._broken_until

    def before_step(self) -> None:
        """Perhaps begin an outage."""
        num_steps = self.rng.randint(1, self.rng.choice(self.max_steps))
        if self.rng.random() < self._share and not self.is_broken and not self.world.is_draining:
            self._broken_until = self.world.num_steps + num_steps
            self.note(f"for {num_steps} steps")

    def repair(self) -> None:
        """Work again."""
        self._broken_until = -1

    def detach(self) -> None:
        """Put what was there back."""
        segments.os = self._real

    def _write(self, descriptor: int, data: bytes) -> int:
        return self._real.write(descriptor, data)

    def _truncate(self, descriptor: int, length: int) -> None:
        self._real.ftruncate(descriptor, length)


class StallingDisk(_Disk):
    """Writes take seconds, and some fail with an I/O error; some of those cannot even be rolled back."""

    name = "stalling disk"
    chance = 0.15
    max_steps = (1, 10)
    share = (0.02, 0.1)

    def _write(self, descriptor: int, data: bytes) -> int:
        if self.is_broken:
            self.world.clock.pass_ms(self.rng.random() * 5_000)
            if self.rng.random() < 0.5:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super()._write(descriptor, data)

    def _truncate(self, descriptor: int, length: int) -> None:
        if self.is_broken and self.rng.random() < 0.5:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super()._truncate(descriptor, length)


class FullDisk(_Disk):
    """A write takes what fits, the next one says ENOSPC; an outage may outlast what the backlog holds."""

    name = "full disk"
    chance = 0.15
    max_steps = (5, 40, 150)
    share = (0.01, 0.05)

    def attach(self) -> None:
        """Let the backlog hold little, so that some outages outlast it."""
        self.world.side.log.store._max_backlog_bytes = self.rng.choice([1_500, 1 << 20])

    def _write(self, descriptor: int, data: bytes) -> int:
        if not self.is_broken:
            return super()._write(descriptor, data)
        num_bytes = self.rng.choice([0, 0, len(data) // 2])
        if not num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super()._write(descriptor, data[:num_bytes])
