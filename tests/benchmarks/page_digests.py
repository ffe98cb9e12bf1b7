"""What digests of pages add to the copies of a worker: with none, a tenth and all of the blocks digested.

The three are taken in turns within one process, so that whatever else the machine does hits all of them; what counts is
the ratio of medians within one run. Blocks are those of 32 layers with 8 heads of 128 in 16 bits, 2 MiB each.

Measures: the copies of one rank, and the digests of the blocks, and of a load's slots as well.
Does not measure: the model's step, which they are a part of, and what the log costs.

    python tests/benchmarks/page_digests.py [--device cuda]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from kvledger.storage.kv import CopyEngine, HostPool, PageDigests, describe_blocks, make_copy_engine

NUM_LAYERS, NUM_BLOCKS, NUM_COPIED, NUM_ROUNDS = 32, 128, 40, 15
SHARES = (0.0, 0.1, 1.0)


def main() -> None:
    """Print a line for each direction and share."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    device = torch.device(parser.parse_args().device)
    caches = {
        f"layer.{number}": torch.randn(NUM_BLOCKS, 2, 16, 8, 128, device=device).to(torch.bfloat16)
        for number in range(NUM_LAYERS)
    }
    layout = describe_blocks(caches, num_blocks=NUM_BLOCKS, block_dims=dict.fromkeys(caches, 0))
    pool = HostPool(NUM_COPIED, layout.block_bytes, pin=device.type == "cuda")
    engine, digests = make_copy_engine(layout, pool), PageDigests(layout, pool)
    ids = list(range(3, 3 + NUM_COPIED))
    for name, copied in (("save", saved), ("load", loaded)):
        times: dict[float, list[float]] = {share: [] for share in SHARES}
        for _ in range(NUM_ROUNDS):
            for share, taken in times.items():
                began = time.perf_counter()
                copied(engine, digests, ids, int(NUM_COPIED * share))
                taken.append(time.perf_counter() - began)
        medians = {share: statistics.median(taken[2:]) for share, taken in times.items()}
        for share, median in medians.items():
            per_block_us = median / NUM_COPIED * 1e6
            print(
                f"{name} {share:4.0%} {per_block_us:9.1f} µs a block of {layout.block_bytes >> 20} MiB, "
                f"{median / medians[0.0]:5.2f} times without"
            )


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


if __name__ == "__main__":
    main()
