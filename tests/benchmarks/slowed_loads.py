"""Loads from the host pool that are no faster than they are told to be, as over a bus that others use as well."""

from __future__ import annotations

import time
from collections.abc import Sequence

import attrs

from kvledger.storage.kv.cpu import CpuCopy, CpuCopyEngine


class SlowedLoads:
    """Slows the loads of this process that are made within a step."""

    bytes_per_s = 0.0
    """0: as fast as they are."""

    def __init__(self) -> None:
        start_load = CpuCopyEngine.start_load

        def start_slowed(engine: CpuCopyEngine, slots: Sequence[int], block_ids: Sequence[int]) -> CpuCopy:
            copy = start_load(engine, slots, block_ids)
            if not self.bytes_per_s:
                return copy
            result = copy.result()
            duration_s = max(result.num_bytes / self.bytes_per_s, result.duration_ns / 1e9)
            time.sleep(duration_s - result.duration_ns / 1e9)
            slowed = CpuCopy()
            slowed.set_result(attrs.evolve(result, duration_ns=round(duration_s * 1e9)))
            return slowed

        CpuCopyEngine.start_load = start_slowed  # type: ignore[method-assign]
