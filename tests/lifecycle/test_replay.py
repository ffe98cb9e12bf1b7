"""A stored log folds to the state it was written from, and today's code is compared with what it recorded."""

from __future__ import annotations

import attrs
import msgspec
import pytest
from lifecycle_driver import Driver, MemorySink, keys_of, play_seed

from kvledger.lifecycle import Core, Divergence, Ledger, Replay, RequestState, fold
from kvledger.lifecycle import events as e
from kvledger.lifecycle.divergences import Divergences
from kvledger.lifecycle.handlers import New
from kvledger.lifecycle.machine import ReferenceMachine
from kvledger.lifecycle.table import GATING, JOB_REGIONS, PHASE, REGIONS
from kvledger.lifecycle.turn import Turn

Log = list[tuple[int, e.Event]]


def story() -> tuple[Driver, Log]:
    """One request is saved, looked up twice, loaded, and finished; with its log."""
    driver = Driver()
    driver.save_prefix("earlier", keys_of("d", 4))
    driver.arrive("a", 40, keys_of("d", 4))
    driver.lookup("a", 0, 40)
    driver.lookup("a", 0, 40)
    driver.allocate("a", (1, 2, 3), 32)
    driver.step(("a", 32, 8, 40))
    driver.settle_all()
    driver.preempt("a", 40)
    driver.finish("a", 0, 41)
    driver.settle_all()
    driver.ledger.commit()
    return driver, driver.events()


def replayed(log: Log, driver: Driver, *, core: Core = Core.standard()) -> Replay:
    """The whole log, decided again."""
    replay = Replay(core, driver.configuration, reference=core.reference)
    replay.run(log)
    return replay


def renumbered(events: list[e.Event]) -> Log:
    """A log of these events, numbered from 1."""
    return list(enumerate(events, start=1))


def first_answer(log: Log) -> tuple[int, tuple[int, e.LookupAnswered]]:
    """Where the first answer stands in the list, and its entry."""
    for index, (sequence, event) in enumerate(log):
        if isinstance(event, e.LookupAnswered):
            return index, (sequence, event)
    raise LookupError("no lookup was answered")


def test_a_log_decided_again_gives_the_same_decisions_and_the_same_state() -> None:
    """No divergence, no difference to the reference machine, equal snapshots."""
    driver, log = story()
    replay = replayed(log, driver)
    assert replay.divergences == []
    assert replay.reference_differences == []
    assert replay.projections.snapshot() == driver.projections.snapshot()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("chunk_size", "block_size"), [(8, 16), (32, 16)])
def test_every_prefix_of_a_log_folds_to_the_state_of_that_moment(seed: int, chunk_size: int, block_size: int) -> None:
    """The live state after each event, and the state folded from the bytes up to it, are equal."""
    print(f"seed {seed}")
    driver = play_seed(seed, 25, chunk_size=chunk_size, block_size=block_size)
    configuration = driver.configuration
    log = driver.events()
    live = Ledger(Core.standard(), configuration, MemorySink())
    moments: dict[int, object] = {}
    for event in [event for _, event in log if not event.is_decision]:
        live.observe(event)
        moments[live.next_sequence - 1] = live.projections.snapshot()
    assert max(moments) == log[-1][0]
    folded = Core.standard().new_projections(configuration)
    for sequence, event in log:
        folded.fold(event, sequence)
        if sequence in moments:
            assert folded.snapshot() == moments[sequence], f"after sequence {sequence}"


def test_folding_stops_after_the_asked_event() -> None:
    """`at` is the sequence number of the last event that counts; beyond the end it is the whole log."""
    driver, log = story()
    (arrived,) = [sequence for sequence, event in log if isinstance(event, e.RequestArrived) and event.ordinal == 1]
    assert fold(Core.standard(), log, driver.configuration, at=arrived - 1).tracker.get("a") is None
    assert fold(Core.standard(), log, driver.configuration, at=arrived).tracker.get("a") is not None
    assert (
        fold(Core.standard(), log, driver.configuration, at=10**9).snapshot()
        == fold(Core.standard(), log, driver.configuration).snapshot()
    )
    assert (
        fold(Core.standard(), log, driver.configuration, at=0).snapshot()
        == Core.standard().new_projections(driver.configuration).snapshot()
    )


def test_an_altered_decision_is_reported_where_it_stands() -> None:
    """The divergence names the sequence number, what was recorded and what is decided today."""
    driver, log = story()
    index, (sequence, answer) = first_answer(log)
    altered = msgspec.structs.replace(answer, miss_reason="slower")
    log[index] = (sequence, altered)
    assert replayed(log, driver).divergences == [Divergence(sequence, altered, answer)]


def test_a_missing_decision_is_reported_at_what_stands_in_its_place() -> None:
    """Here it was the only decision of its observation."""
    driver, log = story()
    events = [event for _, event in log]
    index = next(i for i, event in enumerate(events) if isinstance(event, e.LookupAnswered))
    missing = events.pop(index)
    (first, *_) = replayed(renumbered(events), driver).divergences
    assert first == Divergence(index + 1, None, missing)
    assert "the log has nothing" in str(first)


def test_a_missing_decision_at_the_end_is_reported_by_finish() -> None:
    """There is no next event that could reveal it."""
    driver, log = story()
    while not isinstance(log[-1][1], e.RequestReleased):
        log.pop()
    sequence, released = log.pop()
    replay = Replay(Core.standard(), driver.configuration)
    replay.take(log)
    assert replay.divergences == []
    replay.finish()
    assert replay.divergences == [Divergence(sequence, None, released)]


def test_an_additional_decision_is_reported_where_it_stands() -> None:
    """The log decided something that today's code does not."""
    driver, log = story()
    events = [event for _, event in log]
    index = next(i for i, event in enumerate(events) if isinstance(event, e.LookupAnswered))
    additional = e.RequestQuarantined("a", 0, 0, "somebody else's idea", index)
    events.insert(index + 1, additional)
    (first, *_) = replayed(renumbered(events), driver).divergences
    assert first == Divergence(index + 2, additional, None)
    assert "this code decides nothing" in str(first)


def test_a_decision_that_follows_what_causes_none_is_reported() -> None:
    """Keys that become known cause nothing, in no state; whatever the log decided upon them is foreign."""
    driver, log = story()
    events = [event for _, event in log]
    index = next(i for i, event in enumerate(events) if isinstance(event, e.ChunkKeysObserved))
    additional = e.RequestQuarantined("a", 0, 0, "somebody else's idea", index + 1)
    events.insert(index + 1, additional)
    (first, *_) = replayed(renumbered(events), driver).divergences
    assert first == Divergence(index + 2, additional, None)


def test_after_a_divergence_folding_goes_on_with_what_was_recorded() -> None:
    """The log is the truth; the state is that of the log."""
    driver, log = story()
    index, (sequence, answer) = first_answer(log)
    log[index] = (sequence, msgspec.structs.replace(answer, miss_reason="slower"))
    replay = replayed(log, driver)
    assert replay.projections.snapshot() == fold(Core.standard(), log, driver.configuration).snapshot()
    assert len(replay.divergences) == 1, "one altered word is one divergence"


def test_other_handlers_show_where_they_would_have_decided_otherwise() -> None:
    """The use of deciding again: an extension is tried on a stored log before it serves."""

    class Silent(New):
        def lookup_requested(self, turn: Turn, event: e.LookupRequested) -> None:
            pass

    driver, log = story()
    core = Core.standard().replacing(Silent())
    divergences = replayed(log, driver, core=core).divergences
    assert [divergence.recorded for divergence in divergences] == [
        event for _, event in log if isinstance(event, e.LookupAnswered)
    ]
    assert {divergence.decided for divergence in divergences} == {None}


def test_the_reference_machine_reports_a_table_that_leads_elsewhere() -> None:
    """Every replayed log is a test of one table against the other."""
    driver, log = story()
    rows = tuple((source, trigger, dest) for source, trigger, dest in PHASE.flat() if trigger != "prefill.completed")
    wrong = attrs.evolve(PHASE, rows=(*rows, (RequestState.NEW, "prefill.completed", None)))
    reference = ReferenceMachine([wrong, *REGIONS[1:], *JOB_REGIONS], GATING)
    replay = Replay(Core.standard(), driver.configuration, reference=reference)
    replay.take(log)
    assert {type(difference.recorded) for difference in replay.reference_differences} == {e.PrefillCompleted}


def test_an_id_used_again_before_its_last_job_is_settled_is_no_difference() -> None:
    """An arrival is a birth: the state of the life before says nothing about it."""
    driver = Driver()
    driver.start("a", keys_of("first", 2), 17, (1, 2))
    driver.finish("a", 16, 18)
    driver.arrive("a", 17, keys_of("second", 2))
    driver.settle_all()
    driver.ledger.commit()
    assert replayed(driver.sink.events(), driver).reference_differences == []


def test_a_commit_is_one_frame_and_an_empty_one_is_none() -> None:
    """The sink gets all events of a step together, numbered without a gap."""
    driver = Driver()
    driver.arrive("a", 17, keys_of("a", 2))
    assert driver.ledger.num_uncommitted == 2
    driver.ledger.commit()
    driver.ledger.commit()
    driver.lookup("a", 0, 17)
    driver.ledger.commit()
    assert [(first, count) for first, count, _ in driver.sink.frames] == [(1, 2), (3, 2)]
    assert driver.ledger.num_uncommitted == 0
    assert driver.ledger.next_sequence == 5
    assert [event for _, event in driver.events()] == driver.observed


def test_divergences_are_counted_beyond_those_that_are_kept() -> None:
    """A log of other code may diverge at every event; memory stays bounded."""
    divergences = Divergences()
    for sequence in range(Divergences.MAX_KEPT + 5):
        divergences.append(Divergence(sequence, None, None))
    assert (len(divergences), divergences.num_found) == (Divergences.MAX_KEPT, Divergences.MAX_KEPT + 5)
