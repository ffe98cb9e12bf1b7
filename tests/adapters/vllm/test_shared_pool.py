"""Ranks that hold the same KV keep it once: each writes the slots that are its own, and each loads all.

Every rank has KV of its own here, and what it reads is compared with what it should be: a slot that nobody wrote, or
that was loaded before its rank had written it, is wrong KV on the ranks that load it.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import attrs
import pytest
import torch
from sim.slow_copies import slow_down
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec

from kvledger.adapters.lab.simulation.engine import allocate, vllm_config
from kvledger.adapters.vllm import versions
from kvledger.lifecycle import events as e

pytestmark = pytest.mark.scheduler

BLOCK_SIZE = 16
PROMPT = range(100)


def latent(head_size: int, **more: Any) -> KVCacheSpec:
    """A layer with one vector a token, which every rank has."""
    sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "dtype": torch.int64, "max_tp_shards": 1}
    return MLAAttentionSpec(head_size=head_size, **{**sizes, **more})


def attention() -> KVCacheSpec:
    """A layer whose heads are shared out among the ranks."""
    return FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.int64)


SPECS = {"layers.0.attn": latent(9), "layers.1.attn": latent(9), "layers.0.indexer": latent(2)}
BLOCK_BYTES = sum(spec.page_size_bytes for spec in SPECS.values())


def sharing(make_engine: Any, num_ranks: int = 2, num_slots: int = 40, **options: Any) -> Any:
    """An engine whose ranks hold the same latent vectors."""
    defaults = {
        "num_blocks": 40,
        "max_model_len": 512,
        "chunk_size": BLOCK_SIZE,
        "specs": SPECS,
        "host_bytes": num_slots * BLOCK_BYTES,
        "enable_prefix_caching": False,
    }
    return make_engine(num_ranks=num_ranks, **(defaults | options))


def pools(engine: Any) -> list[Any]:
    """Of each rank."""
    return [worker._worker_side._pool for worker in engine.workers]


def pairs_written(engine: Any) -> Counter[tuple[int, int]]:
    """(block, slot) of every copy out of blocks that any rank begins from now on, and how often."""
    written: Counter[tuple[int, int]] = Counter()

    def watched(save: Any) -> Any:
        def note(block_ids: Any, slots: Any) -> Any:
            written.update(zip(block_ids, slots, strict=True))
            return save(block_ids, slots)

        return note

    for worker in engine.workers:
        for copies in (worker._worker_side._engine, worker._worker_side._async_engine):
            if copies is not None:
                copies.start_save = watched(copies.start_save)
    return written


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_host_bytes_buy_all_ranks_together_one_pool(make_engine: Any, num_ranks: int) -> None:
    """As many slots as one rank alone would have, in one memory."""
    engine = sharing(make_engine, num_ranks)
    assert engine.projections.configuration.num_slots == 40
    first, *others = pools(engine)
    first.buffer[7].fill_(3)
    for other in others:
        assert other.buffer.shape == (40, BLOCK_BYTES)
        assert bool((other.buffer[7] == 3).all())


def test_an_operator_can_let_each_rank_keep_its_own(make_engine: Any) -> None:
    """As with any other model."""
    engine = sharing(make_engine, share_pool=False)
    assert engine.projections.configuration.num_slots == 20
    first, second = pools(engine)
    first.buffer[7].fill_(3)
    assert not bool(second.buffer.any())
    for turn in ("first", "again"):
        engine.serve(turn, PROMPT, 4)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_page_is_written_by_one_rank_and_loaded_by_all(make_engine: Any, num_ranks: int, mode: str) -> None:
    """The log has the bytes of a save once, and those of a load for each rank."""
    engine = sharing(make_engine, num_ranks, load_mode=mode, save_mode=mode)
    written = pairs_written(engine)
    for turn in ("first", "again"):
        engine.serve(turn, PROMPT, 4)
    jobs = {job.job_id: job for job in engine.logged(e.SaveIssued)}
    assert written == Counter(pair for job in jobs.values() for pair in zip(job.block_ids, job.slots, strict=True))
    (load,) = engine.logged(e.LoadIssued)
    num_bytes: Counter[int] = Counter()
    for report in engine.logged(e.TransferReported):
        num_bytes.update(dict(zip(report.job_ids, report.num_bytes, strict=True)))
    assert num_bytes.pop(load.job_id) == num_ranks * len(load.slots) * BLOCK_BYTES
    assert num_bytes == {job_id: len(job.slots) * BLOCK_BYTES for job_id, job in jobs.items()}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_each_rank_reads_what_is_right(
    make_engine: Any, runner: dict[str, bool], seed: int, mode: str
) -> None:
    """Preemptions, evictions, tails and copies that each rank makes at its own time; no page has two writers."""
    chance = random.Random(f"{seed} {mode}")
    engine = sharing(
        make_engine,
        num_ranks=chance.choice([2, 3]),
        num_slots=24,
        num_blocks=14,
        max_model_len=200,
        max_num_batched_tokens=64,
        chunk_size=chance.choice([8, 16, 32]),
        enable_prefix_caching=chance.random() < 0.3,
        load_mode=mode,
        save_mode=mode,
        **runner,
    )
    slow = slow_down(engine) if mode == "async" else []
    written = pairs_written(engine)
    for number in range(14):
        shared = 100 * chance.randrange(3)
        prompt = [*range(shared, shared + chance.randrange(10, 70)), *range(500, 500 + chance.randrange(1, 20))]
        engine.add(f"{number}", prompt, chance.randrange(1, 40))
        for _ in range(chance.randrange(8)):
            engine.step() if engine.scheduler.has_requests() else engine.update()
            for copies in slow:
                for copy in copies.pending()[: chance.randrange(3)]:
                    copy.finish()
    for copies in slow:
        copies.slow.clear()
        for copy in copies.pending():
            copy.finish()
    engine.run()
    assert engine.num_preemptions
    assert engine.logged(e.LoadCompleted)
    issued = [*engine.logged(e.SaveIssued), *engine.logged(e.TailSaveIssued)]
    assert written == Counter(
        pair for job in issued for pair in zip(job.block_ids, job.slots, strict=True) if pair[1] >= 0
    )


@pytest.mark.parametrize("last", [0, 1])
def test_nobody_loads_before_the_last_rank_has_written_its_part(make_engine: Any, last: int) -> None:
    """Also not where the rank that would load is done: what it lacks is another one's to write."""
    engine = sharing(make_engine, load_mode="async", save_mode="async")
    slow = slow_down(engine, "save")
    slow[1 - last].slow.clear()
    engine.add("first", PROMPT, 30)
    while not slow[last].pending("save"):
        engine.step()
    engine.step()
    assert {event.ranks_done for event in engine.logged(e.TransferReported)} == {(1 - last,)}
    engine.add("second", PROMPT, 4)
    for _ in range(3):
        engine.step()
    assert not engine.logged(e.LoadIssued)
    for copy in slow[last].pending():
        copy.finish()
    slow[last].slow.clear()
    engine.run()
    engine.serve("third", PROMPT, 4)
    assert engine.logged(e.LoadCompleted)


def test_a_slot_that_a_rank_still_loads_from_is_written_by_none(make_engine: Any) -> None:
    """The pool is full, and others want the room: the slots are free when the last rank has loaded them."""
    engine = sharing(make_engine, num_slots=6, load_mode="async", save_mode="async")
    engine.serve("first", PROMPT, 1)
    slow = slow_down(engine, "load")
    slow[0].slow.clear()
    engine.add("again", PROMPT, 4)
    while not slow[1].pending("load"):
        engine.step()
    (load,) = engine.logged(e.LoadIssued)
    written = pairs_written(engine)
    engine.add("other", range(200, 330), 4)
    for _ in range(4):
        engine.step()
    assert engine.logged(e.SaveDeclined)
    assert {slot for _, slot in written}.isdisjoint(load.slots)
    for copy in slow[1].pending():
        copy.finish()
    slow[1].slow.clear()
    engine.run()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_could_not_write_nobody_is_offered(make_engine: Any, rank: int) -> None:
    """The others have written their part of it, and a part is nothing."""
    engine = sharing(make_engine, save_mode="async", load_mode="async")
    copies = slow_down(engine, "save")[rank]
    engine.add("first", range(33), 1)
    while not copies.pending():
        engine.step()
    for copy in copies.pending():
        copy.fail()
    copies.slow.clear()
    slower = engine.workers[1 - rank]._worker_side._async_engine
    for copy in slower.pending():
        copy.finish()
    engine.run()
    assert len(engine.projections.pool) == 0
    assert engine.logged(e.SaveFailed)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_digests_say_whether_the_ranks_do_hold_the_same(make_engine: Any, mode: str) -> None:
    """Each rank digests what it has of a save, also of pages that another one writes, and then what it loads."""
    sound = sharing(make_engine, digests="all", load_mode=mode, save_mode=mode)
    differs = sharing(make_engine, digests="all", load_mode=mode, save_mode=mode)
    side = differs.workers[1]._worker_side
    before_save, pages = side._digests.before_save, differs.models[1].kv_caches["layers.0.indexer"]

    def of_other_kv(job: Any) -> None:
        pages.add_(1)
        before_save(job)
        pages.sub_(1)

    side._digests.before_save = of_other_kv
    for engine in (sound, differs):
        for turn in ("first", "again"):
            engine.serve(turn, PROMPT, 4)
        assert {event.rank for event in engine.logged(e.PagesDigested)} == {0, 1}
    assert sound.audit().is_sound
    (violation, *_) = differs.audit().violations
    assert violation.rule == "BYTES_UNCHANGED"
    assert "rank 1" in violation.detail
    differs.check_audit = lambda: None


def test_an_engine_that_sleeps_fails_a_save_on_every_rank(make_engine: Any) -> None:
    """Also on the one that would have had nothing to write."""
    engine = sharing(make_engine, num_ranks=3)
    for worker in engine.workers:
        worker.unregister_kv_caches()
    engine.serve("first", range(17), 2)
    reports = engine.logged(e.TransferReported)
    assert reports
    assert all(report.ranks_failed == (0, 1, 2) for report in reports)


# --- who shares ----------------------------------------------------------------------------------------


@attrs.frozen
class Case:
    """What an engine is, and whether its ranks share a pool."""

    shares: bool
    specs: dict[str, KVCacheSpec] = SPECS
    num_ranks: int = 2
    backend: str | None = "mp"
    num_nodes: int = 1


WHO = {
    "latent vectors and an indexer": Case(shares=True),
    "eight ranks": Case(shares=True, num_ranks=8),
    "one rank": Case(shares=False, num_ranks=1),
    "heads shared out": Case(shares=False, specs={"layers.0.attn": attention()}),
    "a drafter with heads": Case(shares=False, specs={**SPECS, "drafter.attn": attention()}),
    "a layer of which vLLM does not say it": Case(
        shares=False, specs={**SPECS, "layers.9.attn": latent(9, max_tp_shards=None)}
    ),
    "two machines": Case(shares=False, num_nodes=2),
    "placed by Ray": Case(shares=False, backend="ray"),
    "placed by somebody else": Case(shares=False, backend="external_launcher"),
}


@pytest.mark.parametrize("who", WHO)
def test_both_sides_know_alike_who_shares(who: str) -> None:
    """Where all ranks hold the same of every layer, and are on one machine; the scheduler is not shown every layer."""
    case = WHO[who]
    settings = vllm_config(
        num_blocks=40,
        max_model_len=256,
        kv_transfer=None,
    )
    parallel = settings.parallel_config
    parallel.world_size = parallel.tensor_parallel_size = case.num_ranks
    parallel.distributed_executor_backend = case.backend
    parallel.nnodes = case.num_nodes
    of_scheduler, of_workers, _ = allocate(settings, case.specs, "LBNHC", 40, case.num_ranks)
    assert {versions.shares_pool(settings, config) for config in (of_scheduler, *of_workers)} == {case.shares}
