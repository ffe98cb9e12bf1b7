"""A world of one engine in which requests are preempted again and again, while the pool has no room for all they saved.

Copies run within their steps, so nothing in it depends on time. `python -m sim.starving LOG_DIR` leaves its log there,
written with the extensions that are installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from kvledger.adapters.lab.simulation.engine import SimulatedEngine
from kvledger.adapters.lab.simulation.hashed_model import BLOCK_SIZE, block_bytes

_NUM_BLOCKS = 24
"""Of the device, one of them nobody's; two requests fit to their ends, and just as many blocks into the host pool."""
_NUM_REQUESTS = 12


def live(log_dir: Path, extensions: Iterable[str] = ()) -> SimulatedEngine:
    """Serve all requests to their ends; the log is closed."""
    engine = SimulatedEngine(
        num_blocks=_NUM_BLOCKS,
        max_num_seqs=_NUM_REQUESTS,
        enable_prefix_caching=False,
        load_mode="sync",
        save_mode="sync",
        max_silent_ms=0,
        chunk_size=BLOCK_SIZE,
        host_bytes=_NUM_BLOCKS * block_bytes(BLOCK_SIZE),
        # Who was preempted has to stand in line for the pool like everybody else, but for the extension.
        keep_for_preempted=False,
        extensions=list(extensions),
        log_dir=str(log_dir),
    )
    for number in range(_NUM_REQUESTS):
        engine.add(f"request {number}", range(1000 * number, 1000 * number + 40), 110)
    engine.run()
    engine.shutdown()
    return engine


if __name__ == "__main__":
    live(Path(sys.argv[1]))
