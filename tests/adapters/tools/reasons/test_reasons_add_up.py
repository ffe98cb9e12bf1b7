"""Whatever happens in a log, its reasons add up, and a request's are the same told from the events that concern it."""

from __future__ import annotations

import os
from collections import Counter
from typing import get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lifecycle_driver import Driver, keys_of, play_seed
from lifecycle_driver.concerned import CORE, check_reasons, check_stories, differences_of

from kvledger.adapters.tools.logs.totals import LogTotals
from kvledger.adapters.tools.reasons import Accounts, LoadFate, OfferFate, Reason, Sums
from kvledger.lifecycle import LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Model, Reader

SEEDS = [int(os.environ["WALK_SEED"])] if "WALK_SEED" in os.environ else list(range(12))
GEOMETRIES = [(8, 16), (16, 16), (32, 16)]


def walked(seed: int, chunk_size: int, block_size: int) -> Driver:
    """A random walk that has been played."""
    print(f"WALK_SEED={seed} chunk_size={chunk_size} block_size={block_size}")
    return play_seed(seed, 70, chunk_size=chunk_size, block_size=block_size)


@pytest.mark.parametrize(("chunk_size", "block_size"), GEOMETRIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_reasons_of_a_random_walk_add_up_to_its_totals(seed: int, chunk_size: int, block_size: int) -> None:
    """Offered, loaded, missed and recomputed tokens, counted as a whole, by reason, and by the projections."""
    driver = walked(seed, chunk_size, block_size)
    sums = check_reasons(driver.sink.events(), driver.configuration)
    untold = {Reason.UNKNOWN, Reason.NO_LOOKUP, Reason.ROLLED_BACK, Reason.NO_KEY}
    assert not untold & (set(sums.misses()) | set(+sums.recomputed)), "nothing is lost here, so all can be told"


@pytest.mark.parametrize(("chunk_size", "block_size"), GEOMETRIES)
@pytest.mark.parametrize("seed", SEEDS[:4])
def test_a_story_depends_only_on_the_events_that_concern_its_request(
    seed: int, chunk_size: int, block_size: int
) -> None:
    """Told from them alone it is the same as from the whole log; all stories together are the whole."""
    driver = walked(seed, chunk_size, block_size)
    check_stories(driver.sink.events(), driver.configuration)


def test_the_random_walks_meet_many_reasons() -> None:
    """Walks in which nothing but new tokens were computed would prove nothing."""
    sums = Sums()
    for seed in range(8):
        driver = walked(seed, 8, 16)
        sums.add(check_reasons(driver.sink.events(), driver.configuration))
    met = {reason for reason, count in sums.recomputed.items() if count}
    assert met >= {
        Reason.DECLINED,
        Reason.EVICTED,
        Reason.RESET,
        Reason.STALE,
        Reason.SAVE_FAILED,
        Reason.LOAD_FAILED,
        Reason.NOT_CLAIMED,
        Reason.BEHIND_GAP,
        Reason.SAVING,
        Reason.DEFERRAL_EXHAUSTED,
    }
    assert sums.to_load[LoadFate.FAILED] > 0
    assert sums.offered[OfferFate.NOT_CLAIMED] > 0


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_they_add_up_at_every_moment_and_behind_every_gap(seed: int) -> None:
    """A log may end anywhere, and events may be lost anywhere: reasons may then be unknown, sums may not."""
    driver = walked(seed, 8, 16)
    events = driver.sink.events()
    check_reasons(events[: len(events) // 3], driver.configuration)
    lost = range(len(events) // 3, len(events) // 2)
    model = Model(CORE.tables, driver.configuration)
    accounts, totals = Accounts(model), LogTotals(model)
    reader = Reader(model, [accounts, totals])
    reader.take(events[: lost.start])
    reader.lost(events[lost.start][0], events[lost.stop - 1][0])
    reader.take(events[lost.stop :])
    kept = [event for index, event in enumerate(events) if index not in lost]
    assert differences_of(accounts.sums(), totals.figures) == []
    check_reasons(kept, driver.configuration)
    check_reasons(kept[len(kept) // 2 :], driver.configuration)


def test_a_difference_is_named_with_both_sides() -> None:
    """So that a test that fails says which sum is wrong."""
    sums = Sums(num_recomputed=5, recomputed=Counter({Reason.EVICTED: 3}))
    assert differences_of(sums) == ["tokens recomputed: 5, their parts add up to 3"]


SMALL = st.integers(-1, 40)
VALUES: dict[object, st.SearchStrategy[object]] = {
    int: SMALL,
    str: st.sampled_from(["", "a", "b", "missing", "evicted", "quarantined", "window"]),
    bytes: st.sampled_from([b"1", b"2", b"3"]),
    bool: st.booleans(),
    tuple[int, ...]: st.lists(SMALL, max_size=3).map(tuple),
    tuple[bytes, ...]: st.lists(st.sampled_from([b"1", b"2", b"3"]), max_size=3).map(tuple),
    tuple[tuple[int, int, int, int], ...]: st.lists(st.tuples(SMALL, SMALL, SMALL, SMALL), max_size=2).map(tuple),
    tuple[tuple[int, tuple[int, ...]], ...]: st.just(()),
    tuple[e.SettledTokens, ...]: st.just(()),
    tuple[tuple[str, int, str], ...]: st.just(()),
}


def any_event(event_class: type[e.Event]) -> st.SearchStrategy[e.Event]:
    """Events of a class with any values that can be read from a log, also such as nobody writes."""
    hints = get_type_hints(event_class)
    return st.builds(event_class, *(VALUES[hints[name]] for name in event_class.__match_args__)).filter(is_readable)


def is_readable(event: e.Event) -> bool:
    """Whether its numbers are in their ranges: other events are refused as damage before anybody sees them."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=type(event))
    except msgspec.ValidationError:
        return False
    return True


@settings(max_examples=150)
@given(events=st.lists(st.one_of(*map(any_event, CORE.events.values())), max_size=60), gap=st.integers(0, 60))
def test_no_event_makes_the_accounts_fail(events: list[e.Event], gap: int) -> None:
    """A forged or damaged log gives odd reasons, never none, and the sums still add up."""
    ended = []
    model = Model(CORE.tables, LedgerConfiguration(16, 8, 10))
    accounts = Accounts(model, on_end=ended.append, keeps_histories=True)
    reader = Reader(model, [accounts])
    numbered = list(enumerate(events, 1))
    reader.take(numbered[:gap])
    if gap:
        reader.lost(gap, gap)
    reader.take(numbered[gap:])
    reader.finish()
    assert differences_of(accounts.sums()) == []
    for story in (*ended, *accounts.histories):
        assert differences_of(story.sums) == []


def test_an_unsaved_chunk_is_proven_by_its_key_also_after_a_reset() -> None:
    """Incident: world 801384. Of kvledger's own log, the end of the request that had computed it was named instead."""
    driver = Driver()
    driver.start("a", keys_of("a", 2), 32, (1, 2))
    driver.reset()
    driver.step(("a", 32, 1, 33))
    driver.finish("a", 33, 34)
    driver.arrive("b", 33, keys_of("a", 2))
    driver.lookup("b", 0, 33)
    driver.allocate("b", (3, 4, 5))
    driver.step(("b", 0, 33, 33))
    driver.ledger.commit()
    *_, story = check_stories(driver.events(), driver.configuration)
    (observed,) = (
        sequence
        for sequence, event in driver.events()
        if isinstance(event, e.ChunkKeysObserved) and event.request_id == "a"
    )
    (unsaved,) = (span for span in story.lookups[0].spans if span.reason is Reason.UNSAVED)
    assert unsaved.evidence == (observed,)
