"""What copies cost: their speed, the start of a large pool, and the time between forwards while saves run."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import attrs
import torch
from benchmarks.copy_bandwidth import Case, measure

from gpu_check.contents import copied, engines
from gpu_check.machine import GIB, MIB, Machine, Mark
from gpu_check.report import Found
from kvledger.storage.kv import HostPool

RUN_BYTES = (4 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 320 << 10, 2 << 20)


def bandwidth(machine: Machine) -> Found:
    """Runs of 4 KiB to 2 MiB, against one pinned contiguous copy, one direction and both."""
    figures = []
    for run_bytes in RUN_BYTES:
        num_layers = max(1, min(32, machine.moved_bytes // run_bytes // 8))
        copied_blocks = max(2, machine.moved_bytes // (num_layers * run_bytes))
        case = Case(f"runs of {run_bytes >> 10} KiB", num_layers, run_bytes, 2 * copied_blocks, copied_blocks, True)
        for slots in ("consecutive", "random"):
            named = f"{case.name}, {slots} slots, {num_layers * run_bytes * copied_blocks / MIB:.0f} MiB"
            figures += [(named, each) for each in measure(case, machine.rounds, machine.device, slots)]
    lines = [
        f"{named}, {each.what}, {each.contender}: {each.value:.0f} {each.unit}"
        + (f", {each.ratio} of one contiguous copy" if each.ratio else "")
        for named, each in figures
    ]
    rows = [{"case": named, **attrs.asdict(each)} for named, each in figures]
    return Found(len(rows), {"bandwidth": lines, "rows": rows})


def large_pool(machine: Machine) -> Found:
    """A pool as large as the machine has room for: what its start takes, and what it takes of the device."""
    with copied(machine, 16, MIB // 4) as (kv, layout, _):
        num_slots, before = machine.pool_size(layout.block_bytes), machine.memory_taken()
        started = time.perf_counter()
        pool = HostPool(num_slots, layout.block_bytes, pin=True)
        seconds, pinned = time.perf_counter() - started, machine.memory_taken()
        made = engines(layout, pool)
        with_engines = machine.memory_taken()
        blocks, ends = range(16), [*range(pool.slots_a_piece + 8, num_slots, pool.slots_a_piece), num_slots]
        for number, engine in enumerate(made.values()):
            for end in ends:  # of the pool, and around each place where one page-locked piece ends and the next begins
                slots = range(end - 16, end)
                kv.fill_(number + 1)
                engine.start_save(blocks, slots).result()
                kv.zero_()
                engine.start_load(slots, blocks).result()
                assert bool((kv == number + 1).all()), f"slots up to {end} did not keep what they were given"
            engine.close()
        figures = {
            "pool GiB": num_slots * layout.block_bytes / GIB,
            "is pinned": pool.is_pinned,
            "pieces": len(ends),
            "seconds to start": seconds,
            "device MiB taken by the pool": (pinned - before) / MIB,
            "device MiB taken by engines": (with_engines - pinned) / MIB,
        }
        pool.close()
    return Found(len(made), figures)


def gap(machine: Machine) -> Found:
    """The device's time from one forward to the next, and a forward's own, without saves and with them."""
    num_blocks = 16
    left = torch.rand(machine.matrix, machine.matrix, device=machine.device)
    with copied(machine, num_blocks, MIB) as (kv, layout, pool):
        made = engines(layout, pool)
        saves: dict[str, Callable[[], object]] = {"nothing": lambda: None}
        for name, engine in made.items():
            saves[name] = lambda engine=engine: engine.start_save(range(num_blocks), range(num_blocks))  # type: ignore[misc]
        steps: dict[str, list[tuple[Mark, Mark]]] = {name: [] for name in saves}
        held_ns: dict[str, list[int]] = {name: [] for name in saves}
        gaps: dict[str, list[float]] = {name: [] for name in saves}
        for _ in range(machine.rounds):
            for name, start in saves.items():
                marks, pending = [], []
                for step in range(20):
                    begun = machine.mark()
                    torch.mm(left, left)
                    kv[step % num_blocks].add_(1)
                    marks.append((begun, machine.mark()))
                    asked_ns = time.perf_counter_ns()
                    pending.append(start())
                    held_ns[name].append(time.perf_counter_ns() - asked_ns)
                machine.synchronize()
                for copy in pending:
                    if copy is not None:
                        copy.result()  # type: ignore[attr-defined]
                steps[name] += marks
                gaps[name] += [end.until_ms(begun) for (_, end), (begun, _) in itertools.pairwise(marks)]
        for engine in made.values():
            engine.close()
    lines = [
        f"{name}: between forwards {statistics.median(gaps[name]):.3f} ms (most {max(gaps[name]):.3f}), a forward "
        f"{statistics.median(b.until_ms(e) for b, e in steps[name]):.3f} ms, the caller is held for "
        f"{statistics.median(held_ns[name]) / 1e6:.3f} ms (most {max(held_ns[name]) / 1e6:.3f})"
        for name in saves
    ]
    return Found(sum(map(len, gaps.values())), {"16 MiB saved a step": lines})
