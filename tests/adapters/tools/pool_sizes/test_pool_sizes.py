"""What pools of other sizes would have loaded: compared with runs of the same requests with such pools."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lifecycle_driver import Driver, keys_of

from kvledger.adapters.recorded.extension import Recorder
from kvledger.adapters.tools.logs.selection import Selection
from kvledger.adapters.tools.pool_sizes import FACTORS, Estimate, PoolSizes, of_log
from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle.reader import Model, Reader

CHUNK = 16
LONGEST = 5
"""Chunks of the longest prompt."""
SLOTS = 4 * LONGEST
"""So that a quarter of the pool holds one prompt."""

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=LONGEST), min_size=1, max_size=40)


def keys_on(path: Sequence[int]) -> tuple[bytes, ...]:
    """The keys of a prompt that takes these branches."""
    return tuple(keys_of(str(list(path[: chunk + 1])), 1)[0] for chunk in range(len(path)))


def served(paths: Sequence[Sequence[int]], num_slots: int) -> Driver:
    """One request after the other, without a prefix cache of vLLM's."""
    driver = Driver(chunk_size=CHUNK, block_size=CHUNK, num_slots=num_slots)
    for number, path in enumerate(paths):
        name, keys, num_tokens = f"r{number}", keys_on(path), len(path) * CHUNK + 1
        driver.arrive(name, num_tokens, keys)
        num_loaded = driver.lookup(name, 0, num_tokens).num_external_tokens
        driver.allocate(name, range(100, 101 + len(path)), num_loaded)
        driver.step((name, num_loaded, num_tokens - num_loaded, num_tokens))
        driver.settle_all()
        driver.finish(name, num_tokens, num_tokens + 1)
        driver.settle_all()
    return driver


def visitor_of(driver: Driver, **options: int) -> PoolSizes:
    """After the last event of the driver's log."""
    driver.ledger.commit()
    model = Model(Core.standard().tables, driver.configuration)
    visitor = PoolSizes(model, **options)
    reader = Reader(model, [visitor])
    reader.take(driver.sink.events())
    reader.finish()
    return visitor


def estimated(driver: Driver, **options: int) -> Estimate:
    """From the driver's log."""
    return visitor_of(driver, **options).estimate()


# --- compared with other pools ------------------------------------------------------------------


@settings(max_examples=40)
@given(prompts)
def test_requests_one_after_the_other_load_exactly_what_is_estimated(paths: list[list[int]]) -> None:
    """With each size, from the log of one size."""
    estimate = estimated(served(paths, SLOTS))
    assert [size.factor for size in estimate.sizes] == list(FACTORS)
    for size in estimate.sizes:
        assert size.num_slots is not None
        assert size.num_tokens_loaded == served(paths, size.num_slots).totals.figures.num_tokens_loaded, size.factor
    assert estimate.num_tokens_asked == sum(len(path) * CHUNK for path in paths)
    assert estimate.error in {None, 0}


def test_a_sample_is_right_within_a_tenth() -> None:
    """400 prompts of 30 chunks, a pool of 1,200 chunks, at most 1,000 keys followed; the seed is fixed."""
    draw = random.Random(7)
    documents = [[draw.randrange(1 << 30) for _ in range(30)] for _ in range(200)]
    paths = [documents[min(draw.randrange(200), draw.randrange(200))] for _ in range(400)]
    driver = served(paths, 1_200)
    exact, sampled = estimated(driver), estimated(driver, max_keys=1_000)
    assert exact.one_of == 1 < sampled.one_of
    assert exact.num_tokens_asked == sampled.num_tokens_asked
    for mine, its in zip(exact.sizes, sampled.sizes, strict=True):
        assert abs(mine.num_tokens_loaded - its.num_tokens_loaded) < 0.1 * exact.num_tokens_asked


def test_nothing_is_remembered_of_requests_that_are_gone() -> None:
    """Memory follows the keys that are followed, and the requests that are there."""
    visitor = visitor_of(served([[number] for number in range(50)], SLOTS))
    assert not visitor._samples
    assert not visitor._kept_for


# --- what else happens to chunks ----------------------------------------------------------------


def loaded_by_factor(driver: Driver) -> dict[float, int]:
    """Factor → tokens, estimated."""
    return {size.factor: size.num_tokens_loaded for size in estimated(driver).sizes}


def test_a_preempted_request_gets_back_what_is_kept_for_it_with_every_size() -> None:
    """Its two chunks and its tail stay in the pool; another request would find none of them in a quarter of it."""
    driver = Driver(chunk_size=CHUNK, block_size=CHUNK, num_slots=8)
    driver.start("a", keys_of("a", 2), 40, (1, 2, 3))
    driver.preempt("a", 40)
    driver.settle_all()
    driver.save_prefix("b", keys_of("b", 4))
    answer = driver.lookup("a", 0, 41)
    assert answer.num_external_tokens == 40
    driver.allocate("a", (4, 5, 6), 40)
    driver.step(("a", 40, 1, 41))
    driver.settle_all()
    assert set(loaded_by_factor(driver).values()) == {40}


def test_what_vllm_has_itself_is_not_loaded_with_any_size() -> None:
    """The load begins behind the 16 tokens of vLLM's own prefix cache."""
    driver = Driver(chunk_size=CHUNK, block_size=CHUNK, num_slots=8)
    driver.save_prefix("a", keys_of("a", 3))
    driver.admit("b", keys_of("a", 3), 49, (1, 2, 3, 4), num_computed=16, num_external=32)
    estimate = estimated(driver)
    assert {size.num_tokens_loaded for size in estimate.sizes if size.factor >= 0.5} == {32}
    assert estimate.num_tokens_asked == 48 + 32


def test_a_load_never_brings_the_last_token() -> None:
    """Of a prompt of whole chunks it ends one token earlier, which is computed."""
    driver = Driver(chunk_size=CHUNK, block_size=CHUNK, num_slots=8)
    driver.save_prefix("a", keys_of("a", 2))
    driver.admit("b", keys_of("a", 2), 32, (1, 2), num_external=31)
    assert loaded_by_factor(driver)[1] == 31


def test_a_reset_empties_pools_of_every_size() -> None:
    """What was saved before it is stale."""
    driver = Driver(chunk_size=CHUNK, block_size=CHUNK, num_slots=8)
    driver.save_prefix("a", keys_of("a", 2))
    driver.reset()
    driver.admit("b", keys_of("a", 2), 33, (1, 2, 3))
    assert set(loaded_by_factor(driver).values()) == {0}


def test_tainted_chunks_are_in_no_pool() -> None:
    """They could not be loaded, and nobody has saved them again."""
    driver = Driver(chunk_size=CHUNK, block_size=CHUNK, num_slots=8)
    driver.save_prefix("a", keys_of("a", 2))
    driver.admit("b", keys_of("a", 2), 33, (1, 2, 3), num_external=32)
    driver.step(("b", 32, 1, 33))
    (load,) = driver.projections.jobs
    driver.report(load.job_id, ok=False)
    driver.admit("c", keys_of("a", 2), 33, (4, 5, 6))
    assert loaded_by_factor(driver)[1] == 32


def test_chunks_that_a_full_pool_declined_are_in_a_larger_one() -> None:
    """The prompt of 4 chunks fits into twice the size."""
    driver = Driver(chunk_size=CHUNK, block_size=CHUNK, num_slots=2)
    for name in "ab":
        driver.start(name, keys_of("a", 4), 65, range(1, 6))
        driver.finish(name, 65, 66)
        driver.settle_all()
    loaded = loaded_by_factor(driver)
    assert loaded[1] < loaded[2] == 64


def test_behind_a_gap_it_says_which_chunks_are_not_known() -> None:
    """What was in the pool before is not guessed."""
    driver = served([[1], [1]], SLOTS)
    visitor = visitor_of(driver)
    visitor.lost(8, 9)
    assert visitor.estimate().note == "chunks that were saved before event 10 are not known"
    assert len(visitor._stack) == 0


# --- where nothing is estimated -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("core", "configuration", "request_id", "reason"),
    [
        (Core.standard(), LedgerConfiguration(16, 16, 8, windows=(0, 32)), None, "sliding windows"),
        (Core.standard(), LedgerConfiguration(16, 8, 8), None, "shorter than a block"),
        (Core.standard(), LedgerConfiguration(16, 16, 8), "a", "all requests together"),
        (Core.standard().extended(Recorder()), LedgerConfiguration(16, 16, 1), None, "the recorded connector's pool"),
    ],
)
def test_where_the_model_is_wrong_it_says_why_nothing_is_estimated(
    core: Core, configuration: LedgerConfiguration, request_id: str | None, reason: str
) -> None:
    """A figure that nobody can rely on is not shown."""
    visitor, why_not = of_log(Model(core.tables, configuration), core, Selection(request_id=request_id))
    assert visitor is None
    assert reason in why_not


# --- several logs -------------------------------------------------------------------------------


def test_logs_add_up_size_by_size() -> None:
    """Slots are named where the pools are of one size."""
    first, second = (estimated(served([[each], [each], [0]], SLOTS)) for each in (1, 2))
    both = Estimate().with_other(first).with_other(second)
    assert [size.num_slots for size in both.sizes] == [size.num_slots for size in first.sizes]
    assert both.num_tokens_asked == first.num_tokens_asked + second.num_tokens_asked
    assert both.num_tokens_loaded == first.num_tokens_loaded + second.num_tokens_loaded == 2 * CHUNK
    assert {size.num_slots for size in both.with_other(estimated(served([[1]], 8))).sizes} == {None}


def test_a_log_without_an_estimate_is_named_in_the_sum() -> None:
    """The others are summed up all the same."""
    known, unknown = estimated(served([[1], [1]], SLOTS)), Estimate(why_not="it has windows")
    for both in (known.with_other(unknown), unknown.with_other(known)):
        assert both.sizes == known.sizes
        assert both.note == "logs without an estimate are left out: it has windows"
    assert unknown.with_other(unknown) == unknown
