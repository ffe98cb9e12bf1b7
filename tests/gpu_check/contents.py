"""That the bytes are the right ones: every layout, the race that a fence decides, and blocks that are used again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from copy_engines import DTYPES, KV_LAYOUTS, NUM_BLOCKS, make_kv_memory
from copy_engines.batched import find_batched_copy

from gpu_check.machine import MIB, Machine
from gpu_check.report import Found
from kvledger.storage.kv import CopyEngine, HostPool, PendingCopy, describe_blocks, make_copy_engine
from kvledger.storage.kv.cuda import CudaCopyEngine
from kvledger.storage.kv.layout import BlockLayout

SEED = 20260101


def engines(layout: BlockLayout, pool: HostPool) -> dict[str, CopyEngine]:
    """Every engine that kvledger might choose for the layout's device, by name."""
    made = {
        "in the step": make_copy_engine(layout, pool),
        "asynchronous": make_copy_engine(layout, pool, is_async=True),
    }
    batched_copy = find_batched_copy() if layout.device.type == "cuda" else None
    if batched_copy is not None:
        made["batched"] = CudaCopyEngine(layout, pool, is_async=True, batched_copy=batched_copy, batched_from_bytes=0)
    return made


@contextmanager
def copied(machine: Machine, num_blocks: int, page_bytes: int) -> Iterator[tuple[torch.Tensor, BlockLayout, HostPool]]:
    """KV of one layer, float32 `[num_blocks, page_bytes / 4]`, its layout, and a pool of as many slots."""
    kv = torch.zeros(num_blocks, page_bytes // 4, device=machine.device)
    layout = describe_blocks({"layer": kv}, num_blocks=num_blocks, block_dims={"layer": 0})
    pool = HostPool(num_blocks, layout.block_bytes, pin=True)
    try:
        yield kv, layout, pool
    finally:
        pool.close()


def fence(copy: PendingCopy, release: Callable[[], None] = lambda: None) -> None:
    """What the device is given from here on comes after the copy; the host does not wait.

    On the CPU the copy itself is waited for, so `release` must let it go on where it is held back.
    """
    release()
    copy.precede()


def layouts(machine: Machine) -> Found:
    """Saved into mixed slots and loaded into other blocks, as on CPU tensors: every byte, also those between."""
    generator = torch.Generator().manual_seed(SEED)
    num_checks, names = 0, set()
    for geometry_name, geometry in KV_LAYOUTS.items():
        for dtype in DTYPES:
            original = make_kv_memory(geometry, dtype, "cpu", generator)
            sources, targets = (torch.randperm(NUM_BLOCKS, generator=generator)[:7].tolist() for _ in range(2))
            slots = torch.randperm(NUM_BLOCKS + 3, generator=generator)[:7].tolist()
            expected = original.clone()
            expected_pool = HostPool(NUM_BLOCKS + 3, expected.layout().block_bytes, pin=False)
            reference = make_copy_engine(expected.layout(), expected_pool)
            reference.start_save(sources, slots).result()
            reference.start_load(slots, targets).result()
            pool = HostPool(NUM_BLOCKS + 3, expected_pool.slot_bytes, pin=True)
            memory = original.to(machine.device)
            for name, engine in engines(memory.layout(), pool).items():
                memory.allocation.copy_(original.allocation)
                pool.buffer.zero_()
                engine.start_save(sources, slots).result()
                engine.start_load(slots, targets).result()
                assert torch.equal(pool.buffer, expected_pool.buffer), (geometry_name, dtype, name, "slots")
                assert torch.equal(memory.bytes(), expected.bytes()), (geometry_name, dtype, name, "blocks")
                num_checks += 2
                names.add(name)
                engine.close()
            pool.close()
    return Found(num_checks, {"engines": ", ".join(sorted(names))})


def keeps_what_it_saves(machine: Machine, name: str, *, is_fenced: bool) -> bool:
    """A block is written late, a save is started, and the block is overwritten: whether the slot has what it should."""
    with copied(machine, machine.race_bytes // MIB or 1, MIB) as (kv, layout, pool):
        made = engines(layout, pool)
        engine, blocks = made[name], range(len(kv))
        with machine.held_back(engine) as release:
            kv.fill_(1)
            save = engine.start_save(blocks, blocks)
            if is_fenced:
                fence(save, release)
            kv.fill_(2)
        save.result()
        machine.synchronize()
        is_kept = bool((pool.buffer.view(torch.float32) == 1).all())
        for each in made.values():
            each.close()
    return is_kept


def race(machine: Machine) -> Found:
    """Without the fence the slots differ, or the test would show nothing; with it never."""
    with copied(machine, 1, MIB) as (_, layout, pool):
        names = [name for name in engines(layout, pool) if name != "in the step"]
    for name in names:
        assert not keeps_what_it_saves(machine, name, is_fenced=False), f"{name}: the race was won without a fence"
        for _ in range(machine.rounds):
            assert keeps_what_it_saves(machine, name, is_fenced=True), f"{name}: the fence did not hold"
    return Found(len(names) * (1 + machine.rounds), {"engines": ", ".join(names)})


def poisoned(machine: Machine) -> Found:
    """Blocks are saved, freed and full of NaN in the same step, and what comes back in a later one is right."""
    num_checks = 0
    with copied(machine, 64, 64 << 10) as (kv, layout, pool):
        for engine in engines(layout, pool).values():
            generator = torch.Generator().manual_seed(SEED)
            saved: dict[int, torch.Tensor] = {}
            for step in range(machine.num_steps):
                blocks = torch.randperm(64, generator=generator)[:8].tolist()
                noise = torch.rand(8, kv.shape[1], generator=generator).to(machine.device)
                if step % 3 != 2 or not saved:
                    slots = torch.randperm(64, generator=generator)[:8].tolist()
                    kv[blocks] = noise
                    fence(engine.start_save(blocks, slots))
                    kv.fill_(torch.nan)
                    saved.update(zip(slots, noise, strict=True))
                else:
                    slots = sorted(saved)[:8]
                    blocks = blocks[: len(slots)]
                    fence(engine.start_load(slots, blocks))
                    for block_id, slot in zip(blocks, slots, strict=True):
                        assert torch.equal(kv[block_id], saved[slot]), f"slot {slot} at step {step}"
                        num_checks += 1
                    kv.fill_(torch.nan)
            engine.close()
    return Found(num_checks)
