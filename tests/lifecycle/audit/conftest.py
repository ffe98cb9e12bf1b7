"""A healthy log in which everything happens that a checker looks at."""

from __future__ import annotations

import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import Channel
from kvledger.lifecycle import events as e


def healthy_story() -> Driver:
    """A request is preempted, comes back and ends; others press on the pool; the cache is reset and used again.

    Chunks of 8 tokens, blocks of 16, a pool of 7 slots, decoded tokens saved by four chunks.
    """
    driver = Driver(num_slots=7, save_interval_tokens=32)
    keys = keys_of("a", 8)
    driver.observe(e.LogNote("started", 1))
    driver.start("a", keys[:5], 45, (1, 2, 3))
    driver.keys("a", 5, keys[5:6])
    driver.step(("a", 45, 1, 46), settled=[("a", 0, 45)])
    driver.settle_all()
    for step in range(18):
        driver.step(extended=[("a", (4,))] if step == 2 else ())
    driver.keys("a", 6, keys[6:8])
    driver.preempt("a", 64)
    driver.observe(e.LogNote("waiting", 2))
    driver.lookup("a", 0, 65)
    driver.step()
    driver.settle_all()
    driver.lookup("a", 0, 65)
    driver.lookup("a", 0, 65)
    driver.allocate("a", (7, 8, 9, 10, 11), 64)
    driver.step(("a", 64, 1, 65))
    driver.settle_all()
    # "c" is promised the beginning of what "a" saved; it never takes it up. "b" needs room meanwhile.
    driver.arrive("c", 17, keys[:2])
    driver.lookup("c", 0, 17)
    driver.start("b", keys_of("b", 6), 49, (20, 21, 22, 23))
    driver.step(("b", 49, 1, 50), settled=[("a", 0, 64), ("b", 0, 49)])
    driver.settle_all()
    driver.keys("a", 8, keys_of("a", 1, 8))
    for _ in range(7):
        driver.step()
    driver.finish("a", 73, 74)
    driver.settle_all()
    driver.observe(e.LogNote("halfway", 2))
    driver.finish("c", 0, 17)
    driver.finish("b", 50, 51)
    driver.settle_all()
    driver.reset()
    driver.save_prefix("d", keys[:2])
    driver.start("f", keys_of("f", 2), 17, (30, 31))
    driver.step(("f", 17, 1, 18))
    driver.finish("f", 18, 19)
    driver.settle_all()
    driver.step()
    driver.ledger.commit()
    return driver


@pytest.fixture(scope="module")
def story() -> Driver:
    """The healthy story, played once."""
    return healthy_story()


def asynchronous_story() -> Driver:
    """Asynchronous copies: under way at a preemption and at an end, waited for, failed and tried again."""
    driver = Driver(num_slots=12, async_saves=True, async_load_tokens=0, max_deferred_lookups=2, max_failed_loads=2)
    keys = keys_of("a", 4)
    driver.start("a", keys, 33, (1, 2, 3))
    driver.step(("a", 33, 1, 34), settled=[("a", 0, 33)])
    driver.preempt("a", 34)
    driver.poll("a", 0, 35)
    driver.step()
    driver.poll("a", 0, 35)
    driver.settle_all()
    for _ in range(2):
        driver.poll("a", 0, 35)
    driver.allocate("a", (4, 5, 6), 34)
    driver.step()
    driver.settle_all()
    driver.allocate("a", (4, 5, 6))
    driver.step(("a", 34, 1, 35))
    driver.arrive("b", 33, keys)
    driver.poll("b", 0, 33)
    driver.allocate("b", (7, 8, 9), 32)
    driver.step()
    (load,) = [job for job in driver.projections.jobs if job.request_id == "b"]
    driver.report(load.job_id, ok=False)
    driver.poll("b", 0, 33)
    driver.allocate("b", (7, 8, 9))
    driver.step(("b", 0, 33, 33))
    driver.step(("b", 33, 1, 34), settled=[("b", 0, 33)])
    driver.finish("b", 34, 35)
    driver.observe(e.LogNote("ending", 2))
    driver.step()
    driver.settle_all()
    driver.finish("a", 38, 39)
    driver.settle_all()
    driver.step()
    driver.ledger.commit()
    return driver


@pytest.fixture(scope="module")
def asynchronous() -> Driver:
    """The story of asynchronous copies, played once."""
    return asynchronous_story()


def decoding_story() -> Driver:
    """A request decodes 42 tokens behind a prompt of 17; chunks of 8, of which two at a time are dealt with.

    Somebody else has saved them all, so that nothing but the steps says when.
    """
    driver = Driver(save_interval_tokens=16)
    driver.save_prefix("d", keys_of("a", 7))
    driver.start("a", keys_of("a", 7), 17, (1, 2, 3, 4))
    driver.step(("a", 17, 1, 18), settled=[("a", 0, 17)])
    for num_computed in range(18, 59):
        driver.step(settled=[("a", num_computed // 8 - 2, num_computed)] if num_computed in {32, 48} else ())
    driver.finish("a", 59, 60)
    driver.settle_all()
    driver.ledger.commit()
    return driver


@pytest.fixture(scope="module")
def decoding() -> Driver:
    """The story of a request that decodes, played once."""
    return decoding_story()


def crowded_story() -> Driver:
    """Two prefixes of two chunks fill the pool; another request evicts one chunk of the older one."""
    driver = Driver(chunk_size=16, num_slots=4, save_tails=False)
    driver.save_prefix("old", keys_of("old", 2))
    driver.save_prefix("young", keys_of("young", 2), first_block=10)
    driver.start("new", keys_of("new", 1), 17, (20, 21))
    driver.step(settled=[("new", 0, 16)])
    driver.settle_all()
    driver.finish("new", 17, 18)
    driver.settle_all()
    driver.step()
    driver.ledger.commit()
    return driver


@pytest.fixture(scope="module")
def crowded() -> Driver:
    """The story of a full pool, played once."""
    return crowded_story()


def groups_story() -> Driver:
    """Two groups, one of which sees 32 tokens: a request is saved, and another one loads what it saved."""
    driver = Driver(chunk_size=32, num_slots=64, windows=(0, 32))
    driver.start("a", keys_of("a", 3), 96, range(1, 13))
    driver.step(("a", 96, 1, 97), settled=[("a", 0, 96)], extended=[("a", (13, 14))])
    driver.settle_all()
    driver.arrive("b", 97, keys_of("a", 3))
    driver.lookup("b", 0, 97)
    driver.allocate("b", (21, 0, 23, 0, 25, 0, 27, 0, 29, 30, 31, 32, 33, 34), 96)
    driver.settle_all()
    driver.step(("b", 96, 1, 97))
    driver.ledger.commit()
    return driver


@pytest.fixture(scope="module")
def groups() -> Driver:
    """The story of two groups, played once."""
    return groups_story()


def reading_story() -> Driver:
    """A load is in flight while another request evicts and saves; it fails, and the save is silent until asked after.

    Chunks and blocks of 16 tokens, a pool of 5 slots. "c" shares the first block with "b", whose load fills it.
    """
    driver = Driver(chunk_size=16, num_slots=5, max_silent_steps=3)
    for document in ("old", "a"):
        driver.save_prefix(document, keys_of(document, 2))
    driver.arrive("b", 33, keys_of("a", 2))
    driver.lookup("b", 0, 33)
    driver.allocate("b", (1, 2, 3), 32)
    driver.arrive("c", 33, keys_of("c", 2))
    driver.lookup("c", 16, 33)
    driver.allocate("c", (1, 21, 22))
    driver.step(("b", 32, 1, 33), ("c", 16, 17, 33))
    driver.step(settled=[("c", 0, 33)])
    load, save = driver.projections.jobs
    driver.report(load.job_id, ok=False)
    driver.step(("b", 0, 33, 33))
    for _ in range(4):
        driver.step()
    driver.report(save.job_id, is_repeated=True)
    driver.finish("b", 33, 34)
    driver.finish("c", 33, 34)
    driver.settle_all()
    driver.step()
    driver.ledger.commit()
    return driver


@pytest.fixture(scope="module")
def reading() -> Driver:
    """The story of a load that is read meanwhile, played once."""
    return reading_story()


def ordered_story() -> Driver:
    """Two ranks make and report the copies of each step: saves before and after a forward, and a load.

    In the end the first rank has made the save of "c", its device still copies for "d", and no output of the step of
    "e" has arrived.
    """
    driver = Driver(chunk_size=16, num_slots=32, num_ranks=2)
    keys = keys_of("a", 4)
    driver.start("a", keys[:2], 40, (1, 2, 3))
    driver.step(("a", 40, 1, 41), settled=[("a", 0, 40)])
    driver.carry_out()
    driver.preempt("a", 40)
    driver.step()
    driver.carry_out()
    driver.lookup("a", 0, 41)
    driver.allocate("a", (7, 8, 9), 40)
    driver.step(("a", 40, 1, 41))
    driver.carry_out()
    delivered, jobs = {}, {}
    for first_block, name in enumerate("bcde", 20):
        driver.start(name, keys_of(name, 2), 33, range(10 * first_block, 10 * first_block + 3))
        driver.step((name, 33, 1, 34), settled=[(name, 0, 33)])
        if name == "b":
            driver.carry_out()
        else:
            delivered[name] = driver.ledger.next_sequence
            (jobs[name],) = [job.job_id for job in driver.deliver(Channel.WORKERS).jobs]
    driver.report(jobs["c"], ranks=(0,), moments=(delivered["c"], 1, 2, 0, 2, 2))
    driver.observe(e.StepReported(delivered["e"], (0,), (jobs["d"],)))
    for _ in range(6):
        driver.step()
    driver.observe(e.LogNote("the engine goes on", 9))
    driver.ledger.commit()
    return driver


@pytest.fixture(scope="module")
def ordered() -> Driver:
    """The story of copies in order, played once."""
    return ordered_story()
