"""What digests of pages add to the copies of a worker: with none, a tenth and all of the blocks digested, in turns.

Blocks are those of 32 layers with 8 heads of 128 in 16 bits, 2 MiB each.

Measures: the copies of one rank, and the digests of the blocks, and of a load's slots as well.
Does not measure: the model's step, which they are a part of, and what the log costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from benchmarks.figures import Cases, Figure, compared

from kvledger.storage.kv import CopyEngine, HostPool, PageDigests, describe_blocks, make_copy_engine

NUM_LAYERS, NUM_BLOCKS, NUM_COPIED = 32, 128, 40
NUM_WARM_UP = 2
SHARES = {"without": 0.0, "a tenth digested": 0.1, "all digested": 1.0}


def saved(engine: CopyEngine, digests: PageDigests, ids: list[int], num_digested: int) -> None:
    """As a worker saves."""
    found = digests.of_blocks(ids[:num_digested]) if num_digested else None
    engine.start_save(ids, range(NUM_COPIED))
    if found is not None:
        found.tolist()


def loaded(engine: CopyEngine, digests: PageDigests, ids: list[int], num_digested: int) -> None:
    """As a worker loads."""
    stored = digests.of_slots(range(num_digested)) if num_digested else None
    engine.start_load(range(NUM_COPIED), ids)
    if stored is not None:
        assert stored.tolist() == digests.of_blocks(ids[:num_digested]).tolist()


def _measure(
    device: torch.device, copied: Callable[[CopyEngine, PageDigests, list[int], int], None], num_rounds: int
) -> Sequence[Figure]:
    caches = {
        f"layer.{number}": torch.randn(NUM_BLOCKS, 2, 16, 8, 128, device=device).to(torch.bfloat16)
        for number in range(NUM_LAYERS)
    }
    layout = describe_blocks(caches, num_blocks=NUM_BLOCKS, block_dims=dict.fromkeys(caches, 0))
    pool = HostPool(NUM_COPIED, layout.block_bytes, pin=device.type == "cuda")
    engine, digests = make_copy_engine(layout, pool), PageDigests(layout, pool)
    ids = list(range(3, 3 + NUM_COPIED))
    rounds: dict[str, list[float]] = {name: [] for name in SHARES}
    for _ in range(NUM_WARM_UP + num_rounds):
        for name, share in SHARES.items():
            began = time.perf_counter()
            copied(engine, digests, ids, int(NUM_COPIED * share))
            rounds[name].append((time.perf_counter() - began) / NUM_COPIED * 1e6)
    engine.close()
    pool.close()
    rounds = {name: taken[NUM_WARM_UP:] for name, taken in rounds.items()}
    return compared("a block of 2 MiB", "µs", rounds, anchor="without")


def cases(*, full: bool) -> Cases:
    """Saves and loads on the CPU, and on a GPU where there is one."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return {
        f"{name} on {device}": partial(_measure, torch.device(device), copied, 15 if full else 7)
        for device in devices
        for name, copied in (("save", saved), ("load", loaded))
    }
