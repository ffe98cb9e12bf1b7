"""An audit that starts in the middle: what was in flight raises no alarm, and what breaks behind the start is found."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from lifecycle_driver import Driver, MemorySink, keys_of, play_seed

from kvledger.lifecycle import Core, Ledger, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit, Checker, Start, StartFolds

GEOMETRIES = [(8, 16), (16, 16), (32, 16)]
SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 8))]
Found = set[tuple[str, int, str]]
"""Rule, sequence, request."""


def _audit(
    events: Sequence[e.Event], configuration: LedgerConfiguration, cut: int = 0, start: Start | None = None
) -> Audit:
    audit = Audit(Core.standard(), configuration, start=start)
    audit.run(enumerate(events[cut:], start=cut + 1))
    return audit


def _found(audit: Audit, behind: int) -> Found:
    return {(each.rule, each.sequence, each.request_id) for each in audit.violations if each.sequence > behind}


def _starts(events: Sequence[e.Event], configuration: LedgerConfiguration, every: int) -> Iterator[tuple[int, Start]]:
    """What is known at places where an observation comes next, as frames end."""
    folds, is_due = StartFolds(Core.standard(), configuration), False
    for sequence, event in enumerate(events, start=1):
        folds.take([(sequence, event)])
        is_due |= sequence % every == 0
        if is_due and (sequence == len(events) or not events[sequence].is_decision):
            is_due = False
            yield sequence, folds.start()


@pytest.mark.parametrize(("chunk_size", "block_size"), GEOMETRIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_log_cut_anywhere_verifies_as_the_whole_one_does(seed: int, chunk_size: int, block_size: int) -> None:
    """The same findings behind the cut, no divergence, nothing more and nothing less."""
    print(f"seed {seed}, chunk_size {chunk_size}, block_size {block_size}")
    driver = play_seed(seed, 60, chunk_size=chunk_size, block_size=block_size)
    events, configuration = driver.observed, driver.configuration
    whole = _audit(events, configuration)
    for cut, start in _starts(events, configuration, every=25):
        audit = _audit(events, configuration, cut, start)
        assert (audit.divergences, audit.reference_differences, audit.unfoldable) == ([], [], None), cut
        assert _found(audit, cut) == _found(whole, cut), cut
        assert audit.projections.snapshot() == whole.projections.snapshot()


def _mutate(event: e.Event, chance: random.Random) -> e.Event | None:
    """An event as a bug would have written it; None for a class that is left alone."""
    if isinstance(event, e.SaveIssued) and event.block_ids:
        return msgspec.structs.replace(event, block_ids=(99, *event.block_ids[1:]))
    if isinstance(event, e.LookupAnswered) and event.num_external_tokens:
        return msgspec.structs.replace(event, num_external_tokens=event.num_external_tokens + 8)
    if isinstance(event, e.LoadIssued) and event.slots:
        return msgspec.structs.replace(event, slots=tuple(slot + 1 for slot in event.slots))
    if isinstance(event, e.TransferReported):
        return msgspec.structs.replace(event, job_ids=(event.job_ids[0] + chance.choice((1, 100)),))
    return None


@pytest.mark.parametrize(("chunk_size", "block_size"), GEOMETRIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_breaks_behind_the_cut_is_found_there(seed: int, chunk_size: int, block_size: int) -> None:
    """One event behind the cut is written wrongly: the audit from the cut finds what the whole one finds.

    What it finds less is of requests that were there at the cut, of whose past it knows less; it finds nothing more.
    """
    print(f"seed {seed}, chunk_size {chunk_size}, block_size {block_size}")
    chance = random.Random(seed)
    driver = play_seed(seed, 60, chunk_size=chunk_size, block_size=block_size)
    events, configuration = driver.observed, driver.configuration
    num_found = num_missed = 0
    for cut, start in _starts(events, configuration, every=90):
        mutable = [n for n in range(cut, len(events)) if _mutate(events[n], chance) is not None]
        for number in chance.sample(mutable, min(3, len(mutable))):
            wrong = _mutate(events[number], chance)
            assert wrong is not None
            mutant = [*events[:number], wrong, *events[number + 1 :]]
            known = {record.request_id for record in start.projections(Core.standard(), configuration).tracker}
            expected = _found(_audit(mutant, configuration), cut)
            audit = _audit(mutant, configuration, cut, start)
            found = _found(audit, cut)
            assert found <= expected, (cut, number)
            missed = expected - found
            assert {request_id for _, _, request_id in missed} <= known | {""}, (cut, number, missed)
            num_found, num_missed = num_found + len(found), num_missed + len(missed)
    assert num_found > 10 * num_missed


def test_a_job_that_is_asked_after_in_the_first_step_behind_the_cut_is_asked_in_time() -> None:
    """Between two steps enough time may pass for a job to be overdue; nobody could ask after it before the next one."""
    configuration = LedgerConfiguration(block_size=16, chunk_size=16, num_slots=8, max_silent_steps=1, max_silent_ms=5)
    sink = MemorySink()
    ledger = Ledger(Core.standard(), configuration, sink)
    first = [
        e.RequestArrived("a", 0, 32, 1),
        e.ChunkKeysObserved("a", 0, (b"one", b"two")),
        e.LookupRequested("a", 0, 32, 2),
        e.BlocksAllocated("a", (1, 2), 0, 3),
        e.StepScheduled(0, 32, ((0, 0, 32, 32),), (), (), (e.SettledTokens(0, 0, 32),), 4),
        *(e.StepScheduled(step, 0, (), (), (), (), 4 + step) for step in (1, 2, 3)),
        e.RequestArrived("b", 1, 32, 10_000_000),
    ]
    for event in first:
        ledger.observe(event)
    cut = ledger.next_sequence - 1
    folds = StartFolds(Core.standard(), configuration)
    ledger.commit()
    folds.take(sink.events())
    start = folds.start()
    asked = ledger.observe(e.StepScheduled(4, 0, (), (), (), (), 10_000_001))
    assert [type(decision) for decision in asked] == [e.TransferAwaited]
    ledger.commit()
    events = [event for _, event in sink.events()]
    assert _audit(events, configuration).violations == []
    assert _audit(events, configuration, cut, start).violations == []


_NOTHING_TO_TAKE_OVER = {
    "LEGAL_TRANSITION", "SRC_BLOCK_OWNED", "RECORDED",  # remember nothing
    "EXTERNAL_ZERO_NO_LOAD", "FINISH_IS_LAST", "PIN_BALANCE",  # remember an observation for its own decisions
    "SETTLED_SAVED",
    "LOAD_XOR_STORES",  # remembers nothing: the model knows the last two steps
    # The audit's model takes over for them.
    "CHUNK_COMPLETE", "LOADABLE_AFTER_COMMIT", "LOOKUP_PURE", "RESET_EPOCH", "GEN_ISOLATION", "RANK_AGREEMENT",
    "SLOT_EXCLUSIVE", "HIT_PINNED", "WAITING_KEPT", "EVICTION_ORDER", "LONGEST_HIT", "ALLOC_MATCHES_LOOKUP",
    "COMPLETION_ONCE", "LOAD_DST_EXCLUSIVE", "SRC_BLOCK_STABLE", "FAILED_LOAD_TAINT",
    # What they do not know they do not judge.
    "LAST_TOKEN", "TOKEN_CONSERVATION", "DELAY_FREE_CONTRACT", "TABLE_EQ", "RESUME_COVERS_OUTPUT", "ROLLBACK_OBSERVED",
    "KEY_IDENTITY", "BYTES_UNCHANGED", "COPY_IN_TIME", "SETTLED_AT_CLOSE",
    "LIVENESS",  # the first step tells who is overdue; the time of what came before it could be later than its own
}  # fmt: skip


def test_every_checker_takes_over_what_is_in_flight_or_has_a_reason_not_to() -> None:
    """A new checker that remembers something and is not told where it begins would raise false alarms."""
    without = {rule for rule, checker in Core.standard().rules.items() if checker.begin is Checker.begin}
    assert without == _NOTHING_TO_TAKE_OVER


def test_shared_blocks_are_not_named_if_the_audit_begins_between_lookup_and_allocation() -> None:
    """World 3467: such an audit does not know how many of the blocks vLLM found in its prefix cache."""
    driver, keys = Driver(), keys_of("document", 4)
    driver.save_prefix("first", keys)
    driver.arrive("loads", 65, keys)
    driver.allocate("loads", range(5), driver.lookup("loads", 0, 65).num_external_tokens)
    driver.arrive("shares", 65, keys)
    driver.lookup("shares", 64, 65)
    cut, start = len(driver.observed), driver.folded().start()
    driver.allocate("shares", (0, 1, 2, 3, 9), 0)
    for at, known in ((0, None), (cut, start)):
        assert _audit(driver.observed, driver.configuration, at, known).violations == []


def test_a_shared_block_that_is_filled_in_the_next_step_is_not_named_if_the_audit_begins_before_it() -> None:
    """World 781643: one request gets a block of the prefix cache, another one grows by it and fills it."""
    driver, keys = Driver(), keys_of("document", 3)
    driver.arrive("fills", 48, keys)
    driver.lookup("fills", 0, 48)
    driver.allocate("fills", (1,))
    driver.step(("fills", 0, 16, 48))
    driver.arrive("shares", 48, keys)
    driver.lookup("shares", 32, 48)
    driver.allocate("shares", (1, 2, 3))
    cut, start = len(driver.observed), driver.folded().start()
    driver.step(("fills", 16, 16, 48), ("shares", 32, 16, 48), extended=[("fills", (2,))])
    for at, known in ((0, None), (cut, start)):
        assert _audit(driver.observed, driver.configuration, at, known).violations == []
