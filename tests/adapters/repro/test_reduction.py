"""What an incident does not need is left out, and nothing that it does."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.adapters.repro import Recording, record, reenact_core
from kvledger.adapters.repro.reduction import reduce, restrict
from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.chunk_index import ChunkIndex
from kvledger.lifecycle.replay import SequencedEvent

RULE = "HIT_PINNED"


@pytest.fixture
def unpinned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A mistake: a promised chunk is not pinned."""
    with monkeypatch.context() as mistaken:
        mistaken.setattr(ChunkIndex, "_answered", lambda _self, _event, _sequence: None)
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


def recorded(driver: Driver, events: list[SequencedEvent]) -> Recording:
    """Up to the end, where the promised chunk is evicted."""
    return record(driver.configuration, events)


def requests_of(recording: Recording) -> list[str]:
    """Who arrives."""
    return [event.request_id for _, event in recording.observations if isinstance(event, e.RequestArrived)]


@pytest.mark.usefixtures("unpinned")
def test_requests_that_can_be_spared_are_left_out() -> None:
    """What is left breaks the same rule; who evicts and whose chunk is evicted stay."""
    driver, events = crowd()
    reduced = reduce(recorded(driver, events), events, rules={RULE}, request_id="reader")
    assert reduced.recurs
    assert {"reader", "writer", "hog"} <= set(requests_of(reduced.recording))
    assert "bystander" not in requests_of(reduced.recording)
    assert reduced.num_left_out == 5 - len(requests_of(reduced.recording))
    assert RULE in {trouble.rule for trouble in reenact_core(reduced.recording).troubles}


@pytest.mark.usefixtures("unpinned")
def test_everything_is_kept_on_demand() -> None:
    """--all."""
    driver, events = crowd()
    recording = recorded(driver, events)
    reduced = reduce(recording, events, rules={RULE}, request_id="reader", keep_all=True)
    assert reduced.recurs
    assert reduced.recording == recording


def test_where_it_does_not_recur_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake is mended here: what the incident needs cannot be tried, and correct goes over short."""
    with monkeypatch.context() as mistaken:
        mistaken.setattr(ChunkIndex, "_answered", lambda _self, _event, _sequence: None)
        driver, events = crowd()
    recording = recorded(driver, events)
    reduced = reduce(recording, events, rules={RULE}, request_id="reader")
    assert not reduced.recurs
    assert reduced.recording == recording


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
    outcome = reenact_core(restrict(recording, {1}))
    (saved,) = [event for _, event in outcome.events if isinstance(event, e.SaveCompleted)]
    assert (saved.request_id, saved.job_id) == ("b", 1)
    assert outcome.troubles == []


def test_a_smaller_answer_is_taken_up_as_far_as_it_goes() -> None:
    """Under another policy less is answered: the scheduler takes up less and computes the rest in its first step."""
    driver = Driver(chunk_size=8)
    driver.save_prefix("writer", keys_of("w", 4))
    driver.arrive("reader", 40, keys_of("w", 5))
    assert driver.lookup("reader", 0, 40).num_external_tokens == 32
    driver.allocate("reader", (1, 2, 3), 32)
    driver.step(("reader", 32, 8, 40))
    recording = record(driver.configuration, list(enumerate(driver.observed, 1)))
    stricter = attrs.evolve(recording, configuration=attrs.evolve(recording.configuration, max_hit_share=0.5))
    outcome = reenact_core(stricter)
    assert outcome.answers("reader") == [20]
    assert outcome.troubles == []
    (first_step,) = [event for _, event in outcome.events if isinstance(event, e.StepScheduled)][-1:]
    assert first_step.advanced == ((1, 20, 20, 40),)
