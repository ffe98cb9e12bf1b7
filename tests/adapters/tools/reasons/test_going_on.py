"""Accounts that go on from a stored state, and what they say of a log that lacks events."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from lifecycle_driver import Driver, keys_of, play_seed
from lifecycle_driver.concerned import CORE, differences_of

from kvledger.adapters.tools.logs.totals import LogTotals
from kvledger.adapters.tools.reasons import Accounts, Reason, RequestHistory
from kvledger.lifecycle import BlocksRegion, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Model, Reader


def accounts_of(
    configuration: LedgerConfiguration,
    on_end: Callable[[RequestHistory], None] | None = None,
    *,
    request_id: str | None = None,
    keeps_histories: bool = True,
) -> tuple[Reader, Accounts]:
    """Accounts before the first event, and the reader that calls them."""
    model = Model(CORE.tables, configuration)
    accounts = Accounts(model, request_id=request_id, on_end=on_end, keeps_histories=keeps_histories)
    return Reader(model, [accounts]), accounts


@pytest.mark.parametrize("keeps_histories", [True, False])
@pytest.mark.parametrize("request_id", [None, "a"])
@pytest.mark.parametrize("seed", [3, 7, 12])
def test_accounts_go_on_from_their_stored_state(seed: int, request_id: str | None, keeps_histories: bool) -> None:
    """What ends later and what is open at the end is as in one reading."""
    driver = play_seed(seed, 60, chunk_size=16, block_size=16)
    log = list(enumerate(driver.observed, 1))
    for cut in (at - 1 for at, event in log[10::97] if not event.is_decision):
        whole: list[RequestHistory] = []
        reader, accounts = accounts_of(
            driver.configuration, whole.append, request_id=request_id, keeps_histories=keeps_histories
        )
        reader.take(log[:cut])
        num_before = len(whole)
        stored = reader.capture(CORE.fingerprint())
        reader.take(log[cut:])
        ended: list[RequestHistory] = []
        resumed, continued = accounts_of(
            driver.configuration, ended.append, request_id=request_id, keeps_histories=keeps_histories
        )
        resumed.resume(stored, CORE.fingerprint())
        resumed.take(log[cut:])
        assert ended == whole[num_before:]
        assert continued.histories == accounts.histories
        assert continued.sums() == accounts.sums()


def test_a_load_that_fails_when_its_id_is_used_again_says_nothing_of_the_next_life() -> None:
    """The decision names the life by its ordinal."""
    driver = Driver(async_load_tokens=0)
    driver.save_prefix("writer", keys_of("a", 4))
    driver.arrive("a", 33, keys_of("a", 4))
    driver.lookup("a", 0, 33)
    driver.allocate("a", (1, 2), 32)
    (load,) = driver.all_of(e.LoadIssued)
    driver.finish("a", 0, 33)
    driver.arrive("a", 33, keys_of("other", 4))
    driver.lookup("a", 0, 33)
    driver.allocate("a", (4, 5, 6))
    driver.step(("a", 0, 33, 33))
    driver.report(load.job_id, ok=False)
    driver.roll_back("a", 16)
    driver.step(("a", 16, 17, 33))
    driver.ledger.commit()
    reader, accounts = accounts_of(driver.configuration)
    reader.take(driver.sink.events())
    (story,) = [story for story in accounts.histories if story.request_id == "a"]
    assert story.sums.computed_twice == {Reason.ROLLED_BACK: 17}


def test_keys_that_the_log_lacks_leave_the_reason_unknown() -> None:
    """`no_key` is for chunks whose keys no event ever had."""
    driver = Driver()
    driver.start("a", keys_of("a", 2), 17, (1, 2))
    lost_from = len(driver.observed) + 1
    driver.keys("a", 2, keys_of("a", 4)[2:])
    lost_to = len(driver.observed)
    driver.preempt("a", 16)
    driver.lookup("a", 0, 33)
    driver.allocate("a", (3, 4, 5))
    driver.step(("a", 0, 33, 33))
    driver.ledger.commit()
    reader, accounts = accounts_of(driver.configuration)
    events = driver.sink.events()
    reader.take(events[: lost_from - 1])
    reader.lost(lost_from, lost_to)
    reader.take(events[lost_to:])
    (story,) = accounts.histories
    spans = [(span.first_token, span.end_token, span.reason) for span in story.admissions[-1].missed]
    assert spans[-2:] == [(16, 32, Reason.UNKNOWN), (32, 33, Reason.LAST_TOKEN)]


@pytest.mark.parametrize("seed", range(4))
def test_what_a_life_without_its_arrival_computes_again_is_counted_by_neither(seed: int) -> None:
    """Reasons and totals leave out the same lives, wherever the log begins."""
    driver = play_seed(seed, 60, chunk_size=16, block_size=16)
    log = list(enumerate(driver.observed, 1))
    for first in range(20, len(log), len(log) // 5):
        model = Model(CORE.tables, driver.configuration)
        accounts, totals = Accounts(model), LogTotals(model)
        reader = Reader(model, [accounts, totals])
        reader.lost(1, first - 1)
        reader.take(log[first - 1 :])
        assert differences_of(accounts.sums(), totals.figures) == []


@pytest.mark.parametrize("seed", range(6))
def test_reasons_add_up_where_reading_begins_at_a_snapshot(seed: int) -> None:
    """A request that has blocks in the snapshot is not admitted by the first step that has it."""
    driver = play_seed(seed, 60, chunk_size=16, block_size=16)
    log = list(enumerate(driver.observed, 1))
    for cut in (at - 1 for at, event in log[60::101] if not event.is_decision):
        model = Model(CORE.tables, driver.configuration)
        driver.folded(cut).start().resume(model, CORE)
        running = {life.request_id for life in model.lives if life.blocks is not BlocksRegion.NONE}
        accounts, totals = Accounts(model, keeps_histories=True), LogTotals(model)
        accounts.lost(1, cut)
        reader = Reader(model, [accounts, totals])
        reader.take(log[cut : cut + 1])
        assert not any(each.admissions for each in accounts.histories if each.request_id in running)
        reader.take(log[cut + 1 :])
        assert differences_of(accounts.sums(), totals.figures) == []
