"""Sums over the log, each moved by what it counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import given, settings
from lifecycle_driver import Driver, keys_of, play_seed
from lifecycle_driver.any_events import any_log

from kvledger.adapters.figures import ADDS, DURATION_BOUNDS_NS, FORMAT, Durations, Figures, Totals, encoded
from kvledger.adapters.tools.logs.totals import LogTotals
from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Model, Reader
from kvledger.lifecycle.snapshots import capture, restore

CORE = Core.standard()


def moved(driver: Driver) -> dict[str, int]:
    """The figures that are not 0."""
    figures: Figures = driver.totals.figures
    return {name: value for name, value in attrs.asdict(figures).items() if value}


def preempted(num_saved: int = 4, **configuration: Any) -> Driver:
    """A request of 65 tokens, chunks of 16, preempted with 64 settled tokens and its first chunks saved."""
    driver = Driver(chunk_size=16, **configuration)
    driver.start("a", keys_of("a", num_saved), 65, range(5))
    driver.preempt("a", 64)
    driver.settle_all()
    return driver


def resume(driver: Driver, local: int, external: int) -> dict[str, int]:
    """Come back with local and loaded tokens and compute the rest."""
    driver.lookup("a", local, 65)
    driver.allocate("a", range(10, 15), external)
    driver.step(("a", local + external, 65 - local - external, 65))
    driver.settle_all()
    return moved(driver)


def test_nothing_has_happened_in_an_empty_log() -> None:
    """Every figure is 0."""
    assert moved(Driver()) == {}


def test_a_recovery_from_the_host_recomputes_nothing() -> None:
    """64 tokens lost, 64 loaded, the 65th computed for the first time."""
    figures = resume(preempted(), 0, 64)
    assert (figures["num_tokens_recovered"], figures["num_tokens_loaded"]) == (64, 64)
    assert "num_tokens_recomputed" not in figures
    assert "num_tokens_retained" not in figures


def test_what_the_local_prefix_cache_kept_is_retained() -> None:
    """32 found locally, 32 loaded."""
    figures = resume(preempted(), 32, 32)
    assert (figures["num_tokens_retained"], figures["num_tokens_recovered"]) == (32, 32)
    assert "num_tokens_recomputed" not in figures


@pytest.mark.parametrize("max_deferred_lookups", [0, 8])
def test_what_the_local_prefix_cache_kept_is_retained_where_the_answer_was_withheld(max_deferred_lookups: int) -> None:
    """A full disk keeps an offer or a deferral from vLLM, which finds its own 32 tokens all the same."""
    driver = Driver(chunk_size=16, max_deferred_lookups=max_deferred_lookups)
    driver.start("a", keys_of("a", 4), 65, range(5))
    driver.preempt("a", 64)
    driver.poll("a", 32, 65)
    driver.observe(e.DecisionWithheld("a", "", "the event log could not be written", 9))
    driver.allocate("a", range(10, 15))
    driver.step(("a", 32, 33, 65))
    figures = moved(driver)
    assert (figures["num_tokens_retained"], figures["num_tokens_recomputed"]) == (32, 32)


def test_what_is_neither_found_nor_loaded_is_recomputed() -> None:
    """Tokens computed before the preemption and again after it; the last one was never computed."""
    figures = resume(preempted(), 0, 0)
    assert figures["num_tokens_recomputed"] == 64
    assert "num_tokens_recovered" not in figures


def test_a_partly_saved_request_splits_its_tokens() -> None:
    """Every lost token is retained, recovered or recomputed: 16 + 16 + 32 = 64."""
    figures = resume(preempted(num_saved=2), 16, 16)
    assert figures["num_tokens_retained"] + figures["num_tokens_recovered"] + figures["num_tokens_recomputed"] == 64


def test_a_first_prefill_recomputes_nothing() -> None:
    """However long and in however many parts."""
    driver = Driver()
    driver.arrive("a", 65)
    driver.lookup("a", 0, 65)
    driver.allocate("a", range(5))
    driver.step(("a", 0, 32, 65))
    driver.step(("a", 32, 33, 65))
    assert moved(driver) == {"num_requests": 1, "num_lookups": 1, "num_admissions": 1, "num_tokens_queried": 65}


def test_bytes_and_durations_go_to_their_direction() -> None:
    """A report of 100 bytes and 10 ns for a save and one for a load; a foreign report counts nothing."""
    driver = preempted()
    driver.report(77)
    figures = moved(driver)
    assert (figures["num_bytes_saved"], figures["save_duration_ns"]) == (100, 10)
    figures = resume(driver, 0, 64)
    assert (figures["num_bytes_loaded"], figures["load_duration_ns"], figures["num_bytes_saved"]) == (100, 10, 100)


def test_each_of_these_events_counts_one() -> None:
    """Arrivals, evictions, taints, failures, violations, failed hooks; declined chunks by their number."""
    cases: list[tuple[e.Event, dict[str, Any]]] = [
        (e.RequestArrived("b", 9, 5, 1), {"num_requests": 1}),
        (e.ChunksEvicted((b"k",), "b", 9, 0, 1), {"num_chunks_evicted": 1}),
        (e.ChunksTainted((b"k",), 1), {"num_chunks_tainted": 1}),
        (e.LoadFailed("b", 9, 0, 5, "", 1), {"num_loads_failed": 1}),
        (e.SaveFailed("b", 9, 0, 5, "", True, 1), {"num_saves_failed": 1}),
        (e.SaveDeclined("b", 9, 0, 2, 3, "pool_full", 1), {"num_chunks_declined": 3}),
        (e.ExtensionStopped("starvation", 1, "kept", "KeyError", 1), {"num_extensions_stopped": 1}),
        (e.InvariantViolated("RULE", "b", 9, 0, "", 1), {"num_violations": 1}),
        (e.HookFailed("hook", "", "", 1), {"num_hook_failures": 1}),
    ]
    for event, expected in cases:
        driver = Driver()
        driver.projections.fold(event, 1)
        assert moved(driver) == expected, event.id


def test_saved_chunks_and_answers_are_counted_in_their_units() -> None:
    """Four chunks saved; every poll is a lookup, and its answer counts as offered tokens."""
    driver = preempted()
    driver.lookup("a", 0, 65)
    driver.lookup("a", 32, 65)
    figures = moved(driver)
    assert figures["num_chunks_saved"] == 4
    assert (figures["num_lookups"], figures["num_tokens_offered"]) == (3, 96)


def test_a_hit_counts_once_for_each_admission() -> None:
    """However often it was offered, and only what was claimed of it; the local prefix is not queried."""
    driver = preempted()
    before = driver.totals.figures.num_tokens_queried
    for _ in range(3):
        driver.lookup("a", 16, 65)
    driver.allocate("a", range(10, 15), 32)
    driver.allocate("a", range(10, 15), 0)  # the second phase of an asynchronous load
    figures = moved(driver)
    assert (figures["num_admissions"], figures["num_tokens_hit"]) == (2, 32)
    assert figures["num_tokens_queried"] - before == 65 - 16
    assert figures["num_tokens_offered"] == 3 * 48


def reasons_after(driver: Driver) -> tuple[dict[str, int], dict[str, int]]:
    """Tokens missed and recomputed by reason, since the first prefill."""
    state = driver.totals.state
    missed = {**state.num_tokens_missed_by}
    missed["missing"] -= 65  # the first prefill found an empty pool
    return {reason: number for reason, number in missed.items() if number}, state.num_tokens_recomputed_by


def test_computed_tokens_have_the_reason_of_the_answer() -> None:
    """The pool holds two chunks; the third was never saved."""
    driver = preempted(num_slots=2)
    resume(driver, 0, 32)
    assert reasons_after(driver) == ({"missing": 33}, {"missing": 32})


def test_offered_tokens_that_are_not_claimed_have_a_reason_of_their_own() -> None:
    """The last token was not offered: it is computed in any case."""
    driver = preempted()
    resume(driver, 0, 16)
    assert reasons_after(driver) == ({"not_loaded": 48, "complete": 1}, {"not_loaded": 48})


def test_tokens_in_the_pool_that_are_not_offered_are_told_from_those_that_are_missing() -> None:
    """VLLM's own prefix ends within a block, and a load begins with one."""
    driver = preempted()
    driver.lookup("a", 8, 65)
    driver.allocate("a", range(10, 15))
    driver.step(("a", 8, 57, 65))
    assert reasons_after(driver) == ({"not_offered": 56, "complete": 1}, {"not_offered": 56})


def test_tokens_of_an_allocation_without_a_lookup_are_recomputed_for_that() -> None:
    """No answer says why."""
    driver = preempted()
    driver.allocate("a", range(10, 15))
    driver.step(("a", 0, 65, 65))
    assert reasons_after(driver) == ({}, {"no_lookup": 64})


def counts_of(durations: Durations) -> dict[int, int]:
    """The buckets that are not empty."""
    return {bucket: count for bucket, count in enumerate(durations.counts) if count}


def test_a_duration_belongs_to_the_first_bound_that_it_does_not_exceed() -> None:
    """The sum goes with it, so that the mean of a bucket lies in it."""
    durations = Durations()
    for duration_ns in (0, DURATION_BOUNDS_NS[0], DURATION_BOUNDS_NS[0] + 1, DURATION_BOUNDS_NS[-1] + 1):
        durations.add(duration_ns)
    assert counts_of(durations) == {0: 2, 1: 1, len(DURATION_BOUNDS_NS): 1}
    assert durations.sums_ns[0] == DURATION_BOUNDS_NS[0]


def test_a_recovery_lasts_from_the_first_preemption_until_a_step_runs_the_request() -> None:
    """Preempted again before it ran it is one recovery; one that ends before is none."""
    driver = preempted()
    totals = driver.totals
    (preempted_ns,) = totals.state.preempted_ns.values()
    driver.lookup("a", 0, 65)
    driver.allocate("a", range(10, 15), 64)
    driver.preempt("a", 0)
    assert list(totals.state.preempted_ns.values()) == [preempted_ns]
    driver.settle_all()
    resume(driver, 0, 0)
    assert sum(totals.state.recovery_times.counts) == 1
    assert totals.state.recovery_times.sums_ns[0] > 0
    assert totals.state.preempted_ns == {}
    driver.preempt("a", 65)
    driver.settle_all()
    driver.finish("a", 65, 65)
    assert sum(totals.state.recovery_times.counts) == 1
    assert totals.state.preempted_ns == {}


def test_copies_are_timed_by_their_direction() -> None:
    """Each report that was measured; one that failed was not."""
    driver = preempted()
    state = driver.totals.state
    assert (sum(state.save_times.counts), sum(state.load_times.counts)) == (1, 0)
    resume(driver, 0, 64)
    assert sum(state.load_times.counts) == 1


# --- counted a second time, by reading --------------------------------------------------------


def read_totals(configuration: LedgerConfiguration, events: Iterable[e.Event]) -> Iterator[tuple[Totals, LogTotals]]:
    """The totals that follow live projections and those of a reader, after each event of a log."""
    projections, model = CORE.new_projections(configuration), Model(CORE.tables, configuration)
    live, read = Totals(projections), LogTotals(model)
    reader = Reader(model, [read])
    for sequence, event in enumerate(events, 1):
        projections.fold(event, sequence)
        reader.take([(sequence, event)])
        yield live, read


@pytest.mark.parametrize("seed", range(6))
def test_whoever_reads_a_log_counts_what_was_counted_live(seed: int) -> None:
    """After every event, with what is still to be added."""
    driver = play_seed(seed, 60, chunk_size=16, block_size=(8, 16)[seed % 2])
    for live, read in read_totals(driver.configuration, driver.observed):
        assert read.state == live.state
    assert driver.totals.stored() == encoded(read.state)
    assert read.figures.num_preemptions > 0


@settings(max_examples=50)
@given(any_log())
def test_what_states_refuse_is_counted_in_neither_way(log: tuple[LedgerConfiguration, list[e.Event]]) -> None:
    """Observations in any order."""
    for live, read in read_totals(*log):
        assert read.state == live.state


def test_a_recovery_is_not_timed_over_a_gap() -> None:
    """The request may have run in the meantime."""
    driver = preempted()
    model = Model(CORE.tables, driver.configuration)
    totals = LogTotals(model)
    reader = Reader(model, [totals])
    reader.take(enumerate(driver.observed, 1))
    num_read = len(driver.observed)
    assert totals.state.preempted_ns
    resume(driver, 0, 64)
    reader.lost(num_read + 1, num_read + 5)
    reader.take((sequence, event) for sequence, event in enumerate(driver.observed, 1) if sequence > num_read + 5)
    assert sum(totals.state.recovery_times.counts) == 0


def test_of_a_log_that_begins_late_each_event_is_counted_as_far_as_it_says_what_it_is_about() -> None:
    """A preemption is one, though nothing is known of the request."""
    driver = preempted()
    model = Model(CORE.tables, driver.configuration)
    totals = LogTotals(model)
    reader = Reader(model, [totals])
    (at,) = [number for number, event in enumerate(driver.observed, 1) if isinstance(event, e.RequestPreempted)]
    resume(driver, 0, 0)
    reader.lost(1, at - 1)
    reader.take((sequence, event) for sequence, event in enumerate(driver.observed, 1) if sequence >= at)
    assert (totals.figures.num_preemptions, totals.figures.num_lookups) == (1, 1)
    assert (totals.figures.num_requests, totals.figures.num_tokens_recomputed) == (0, 0)


# --- what is left out, and what fails -----------------------------------------------------------


def test_a_refused_observation_is_not_counted() -> None:
    """A lookup of a request that computes, a second preemption in a row, blocks for a request that is not known."""
    driver = Driver()
    for name in ("a", "b"):
        driver.start(name, (), 17, (1, 2))
    driver.preempt("b", 16)
    before = moved(driver)
    driver.observe(e.LookupRequested("a", 0, 17, 9))
    driver.preempt("b", 16)
    driver.allocate("unknown", (5,))
    assert len(driver.all_of(e.InvariantViolated)) == 3
    assert moved(driver) == before | {"num_violations": 3}


def test_totals_go_on_from_stored_ones() -> None:
    """In the middle of a recovery, too: what will be added then is part of them."""
    driver = preempted()
    driver.lookup("a", 0, 65)
    begun = restore(Core.standard(), capture(driver.projections), driver.configuration)
    totals, num_events = Totals.continued(begun, driver.totals.stored()), len(driver.observed)
    assert totals.state == driver.totals.state
    driver.allocate("a", range(10, 15), 64)
    driver.step(("a", 64, 1, 65))
    for sequence, event in enumerate(driver.observed[num_events:], num_events + 1):
        begun.fold(event, sequence)
    assert totals.stored() == driver.totals.stored()
    assert totals.figures.num_tokens_recovered == 64


@pytest.mark.parametrize(
    "stored", [b"", b"\xc1", msgspec.msgpack.encode((FORMAT + 1, {})), msgspec.msgpack.encode((FORMAT, {"loading": 1}))]
)
def test_totals_that_cannot_be_used_are_not_complete(stored: bytes) -> None:
    """What follows is counted; nobody is told that it is all."""
    driver = Driver()
    totals = Totals.continued(driver.projections, stored)
    driver.arrive("a", 17)
    assert (totals.figures.num_requests, totals.complete_figures, totals.stored()) == (1, None, b"")


def test_counting_that_fails_ends_and_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported once; the ledger stays sound and goes on deciding."""

    def fail(*_arguments: object) -> None:
        raise KeyError("a mistake of ours")

    driver, errors = Driver(), []
    monkeypatch.setitem(ADDS, e.LookupRequested, fail)
    totals = Totals(driver.projections, on_failed=errors.append)
    driver.arrive("a", 17)
    answers = [driver.lookup("a", 0, 17), driver.lookup("a", 0, 17)]
    assert all(isinstance(answer, e.LookupAnswered) for answer in answers)
    assert not driver.ledger.is_corrupt
    assert [type(error) for error in errors] == [KeyError]
    assert (totals.figures.num_requests, totals.figures.num_lookups, totals.complete_figures) == (1, 0, None)
