"""How close the copy engine comes to one contiguous copy of the same bytes.

    python tests/benchmarks/copy_bandwidth.py [--json] [--rounds 15] [--device cpu]

Each round times, one after the other, a contiguous `copy_` and the engine on the same number of bytes; the medians are
compared, and only ratios of one run mean anything. Block ids are always in random order. Slots are `consecutive`, as an
allocator with room hands them out, or `random`, as in a pool that has been full for long. Use a quiet machine: torch's
threads wait for each other, and a busy core slows many short calls far more than one long copy.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import attrs
import torch

from kvledger.storage.kv import HostPool, describe_blocks, make_copy_engine

KIB, MIB = 1 << 10, 1 << 20


@attrs.frozen
class Case:
    """One shape of KV cache; a call moves `copied_blocks` of its `num_blocks`."""

    name: str
    num_layers: int
    page_bytes: int
    num_blocks: int
    copied_blocks: int
    one_allocation: bool


@attrs.frozen
class Row:
    """One line of the result. `ratio` is the contiguous copy's median time over the engine's."""

    case: str
    slots: str
    call: str
    engine_gb_s: float
    contiguous_gb_s: float
    ratio: float


CASES = (
    Case("32 layers x 64 KiB, one allocation", 32, 64 * KIB, 256, 64, one_allocation=True),
    Case("32 layers x 64 KiB, a tensor a layer", 32, 64 * KIB, 256, 64, one_allocation=False),
    Case("32 layers x 32 KiB, one allocation", 32, 32 * KIB, 512, 128, one_allocation=True),
    Case("32 layers x 16 KiB, one allocation", 32, 16 * KIB, 1024, 128, one_allocation=True),
    Case("32 layers x 16 KiB, a tensor a layer", 32, 16 * KIB, 1024, 128, one_allocation=False),
    Case("32 layers x 1 KiB, one allocation", 32, KIB, 4096, 512, one_allocation=True),
)


def kv_caches_of(case: Case, device: torch.device) -> dict[str, torch.Tensor]:
    """The case's KV tensors, uint8 `[num_blocks, page_bytes]` a layer."""
    shape = (case.num_blocks, case.page_bytes)
    if case.one_allocation:
        together = torch.randint(0, 256, (case.num_layers, *shape), dtype=torch.uint8, device=device)
        return {f"layer.{i}": together[i] for i in range(case.num_layers)}
    return {
        f"layer.{i}": torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for i in range(case.num_layers)
    }


def measure(case: Case, rounds: int, device: torch.device) -> list[Row]:
    """Time every call of the case against the contiguous copy, interleaved."""
    layout = describe_blocks(
        kv_caches_of(case, device),
        num_blocks=case.num_blocks,
        block_dims={f"layer.{i}": 0 for i in range(case.num_layers)},
    )
    pool = HostPool(case.num_blocks, layout.block_bytes, pin=True)
    engine = make_copy_engine(layout, pool)
    order = random.Random(20260101)
    block_ids = order.sample(range(case.num_blocks), case.copied_blocks)
    num_bytes = case.copied_blocks * layout.block_bytes
    on_device = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    on_host_pool = HostPool(1, num_bytes, pin=True)
    on_host = on_host_pool.buffer.view(-1)
    rows: list[Row] = []
    for slot_order, slots in (
        ("consecutive", list(range(case.copied_blocks))),
        ("random", order.sample(range(case.num_blocks), case.copied_blocks)),
    ):
        calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "save": (lambda: on_host.copy_(on_device), partial(engine.save, block_ids, slots)),
            "load": (lambda: on_device.copy_(on_host), partial(engine.load, slots, block_ids)),
        }
        for call, (contiguous, copy) in calls.items():
            contiguous_ns, engine_ns = [], []
            for _ in range(rounds):
                contiguous_ns.append(_timed(contiguous, device))
                engine_ns.append(_timed(copy, device))
            anchor, ours = statistics.median(contiguous_ns), statistics.median(engine_ns)
            rows.append(Row(case.name, slot_order, call, num_bytes / ours, num_bytes / anchor, anchor / ours))
    engine.close()
    pool.close()
    on_host_pool.close()
    return rows


def _timed(call: Callable[[], object], device: torch.device) -> int:
    started_ns = time.perf_counter_ns()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns() - started_ns


def main() -> None:
    """Measure every case and print a table, or JSON."""
    parser = argparse.ArgumentParser(description="Copy engine against one contiguous copy of the same bytes.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds for each call (default 15)")
    parser.add_argument("--device", default="cpu", help="torch device of the KV tensors (default cpu)")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows = [row for case in CASES for row in measure(case, arguments.rounds, device)]
    if arguments.json:
        report = {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "device": str(device),
            "rounds": arguments.rounds,
            "rows": [attrs.asdict(row) for row in rows],
        }
        print(json.dumps(report, indent=2))
        return
    print(f"{'case':<38} {'slots':<12} {'call':<5} {'GB/s':>7} {'contig.':>8} {'ratio':>6}")
    for row in rows:
        print(
            f"{row.case:<38} {row.slots:<12} {row.call:<5} {row.engine_gb_s:>7.1f} {row.contiguous_gb_s:>8.1f} "
            f"{row.ratio:>6.2f}"
        )


if __name__ == "__main__":
    main()
