"""What an incident does not need is left out, and nothing that it does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.adapters.lab.repro import record, rerun_core
from kvledger.adapters.lab.repro.recording import of_jobs
from kvledger.adapters.lab.repro.reduce import Reduced, minimal, reduce, restrict
from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.pool import Pool
from kvledger.lifecycle.replay import SequencedEvent

RULE = "HIT_PINNED"


@pytest.fixture
def unpinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A mistake: a promised chunk is not pinned."""
    with monkeypatch.context() as mistaken:
        mistaken.setattr(Pool, "_answered", lambda _self, _event, _sequence: None)
        yield


def crowd() -> tuple[Driver, list[SequencedEvent]]:
    """`reader` is promised the chunk of `writer`; then `hog` takes its slot. Nobody else matters."""
    driver = Driver(chunk_size=16, num_slots=3, save_tails=False)
    driver.start("bystander", (), 12, (90,))
    driver.save_prefix("writer", keys_of("w", 1))
    driver.start("passer-by", keys_of("p", 1), 17, (40, 41))
    driver.step(("passer-by", 17, 1, 18), settled=[("passer-by", 0, 17)])
    driver.settle_all()
    driver.arrive("reader", 30, keys_of("w", 1))
    driver.lookup("reader", 0, 30)
    driver.start("hog", keys_of("h", 3), 49, (50, 51, 52, 53))
    driver.step(("hog", 49, 1, 50), settled=[("hog", 0, 49)])
    return driver, list(enumerate(driver.observed, 1))


def reduced(driver: Driver, events: list[SequencedEvent]) -> Reduced:
    """Up to the end, where the promised chunk is evicted."""
    recording = record(driver.configuration, events)
    return reduce(recording, rerun_core, rule=RULE, request_id="reader", leaves_out_calls=True)


@pytest.mark.usefixtures("unpinned")
def test_what_can_be_spared_is_left_out() -> None:
    """What is left breaks the same rule when it is read back; who evicts and whose chunk is evicted stay."""
    driver, events = crowd()
    found = reduced(driver, events)
    assert found.recurs
    assert found.events is not None
    left = record(driver.configuration, found.events)
    arrived = [event.request_id for _, event in left.observations if isinstance(event, e.RequestArrived)]
    assert {"reader", "writer", "hog"} == set(arrived)
    assert found.num_left_out == 2
    assert RULE in {trouble.rule for trouble in rerun_core(left).troubles}
    assert len(left.observations) < len([event for _, event in events if not event.is_decision])


def test_where_it_does_not_recur_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake is mended here: what the incident needs cannot be tried, and correct goes over short."""
    with monkeypatch.context() as mistaken:
        mistaken.setattr(Pool, "_answered", lambda _self, _event, _sequence: None)
        driver, events = crowd()
    found = reduced(driver, events)
    assert (found.recurs, found.events) == (False, None)


def test_what_is_minimal_holds_and_nothing_of_it_can_be_spared() -> None:
    """In the order of the whole."""
    tried: list[list[int]] = []

    def holds(some: Sequence[int]) -> bool:
        tried.append(list(some))
        return {3, 11, 12} <= set(some)

    assert minimal(range(20), holds) == [3, 11, 12]
    assert [3, 11] in tried
    assert len(tried) < 60
    assert minimal(range(20), lambda _: True) == []


def test_steps_count_only_who_is_left() -> None:
    """Their tokens are those of the requests that are kept, steady ones included, and silence keeps its length."""
    driver = Driver()
    driver.start("a", (), 12, (1,))
    driver.start("b", (), 12, (2,))
    driver.step(("a", 12, 1, 13), ("b", 12, 1, 13))
    driver.step(num_scheduled_tokens=2)
    driver.step(num_scheduled_tokens=2)
    recording = record(driver.configuration, list(enumerate(driver.observed, 1)))
    steps = [event for _, event in restrict(recording, {0}).observations if isinstance(event, e.StepScheduled)]
    assert [event.num_scheduled_tokens for event in steps] == [12, 0, 1, 1, 1]
    assert [event.step for event in steps] == [0, 1, 2, 3, 4]


def test_reports_follow_the_jobs_of_who_is_left() -> None:
    """Job numbers change where others are left out; reports go by what each job was issued for."""
    driver = Driver()
    for name in ("a", "b"):
        driver.start(name, keys_of(name, 2), 17, (1, 2) if name == "a" else (3, 4))
    driver.step(("a", 17, 1, 18), ("b", 17, 1, 18), settled=[("a", 0, 17), ("b", 0, 17)])
    driver.report(2)
    recording = record(driver.configuration, list(enumerate(driver.observed, 1)))
    outcome = rerun_core(restrict(recording, {1}))
    (saved,) = [event for _, event in outcome.events if isinstance(event, e.SaveCompleted)]
    assert (saved.request_id, saved.job_id) == ("b", 1)
    assert outcome.troubles == []


def test_a_smaller_answer_is_claimed_as_far_as_it_goes() -> None:
    """From a smaller pool less is answered: the scheduler takes up less and computes the rest in its first step."""
    driver = Driver(chunk_size=8)
    driver.save_prefix("writer", keys_of("w", 4))
    driver.arrive("reader", 40, keys_of("w", 5))
    assert driver.lookup("reader", 0, 40).num_external_tokens == 32
    driver.allocate("reader", (1, 2, 3), 32)
    driver.step(("reader", 32, 8, 40))
    recording = record(driver.configuration, list(enumerate(driver.observed, 1)))
    (lookup,) = recording.answers
    stricter = attrs.evolve(recording, configuration=attrs.evolve(recording.configuration, num_slots=1))
    outcome = rerun_core(stricter)
    assert outcome.other_answers == [f"reader gets 16 tokens in the lookup of event {lookup}, not 32"]
    assert outcome.troubles == []
    (first_step,) = [event for _, event in outcome.events if isinstance(event, e.StepScheduled)][-1:]
    assert first_step.advanced == ((1, 16, 24, 40),)


@pytest.mark.parametrize(("sizes", "kept"), [((5,), (0,)), ((5, 6, 7), (6,)), ((), (0,))])
def test_a_damaged_report_has_sizes_for_other_jobs_than_it_names(sizes: tuple[int, ...], kept: tuple[int, ...]) -> None:
    """`kvledger repro` ended with 70, because it paired the two strictly."""
    report = e.TransferReported((1, 2), (0,), (), False, sizes, 0, "", "", 0)
    left = of_jobs(report, {2: 9})
    assert left is not None
    assert (left.job_ids, left.num_bytes) == ((9,), kept)
