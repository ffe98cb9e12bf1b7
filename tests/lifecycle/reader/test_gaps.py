"""What the reader knows where events are missing: lives go on, and nothing is claimed that cannot be known."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lifecycle_driver import Driver, play_seed
from lifecycle_driver.any_events import any_log
from lifecycle_driver.gaps import take_with_gap

from kvledger.lifecycle import Core, LedgerConfiguration, SequencedEvent
from kvledger.lifecycle import events as e
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader import EVERY_PART, Life, Model, Reader, Visitor

CORE = Core.standard()


class Ends(Visitor[Model]):
    """Collects which lives end, and after how many events."""

    needs = tuple(EVERY_PART)

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.ended_at: list[tuple[int, str, int]] = []
        self.releases: list[int] = []
        self.gaps: list[tuple[int, int]] = []
        self.is_finished = False

    def lost(self, first_sequence: int, last_sequence: int) -> None:
        """Remember it."""
        self.gaps.append((first_sequence, last_sequence))

    def ended(self, life: Life) -> None:
        """Remember it."""
        self.ended_at.append((self.moment.sequence, life.request_id, life.ordinal))

    def finish(self) -> None:
        """Remember it."""
        self.is_finished = True

    @on(e.RequestReleased)
    def _released(self, event: e.RequestReleased) -> None:
        assert (self.moment.sequence, event.request_id, event.ordinal) not in self.ended_at, "after its last event"
        self.releases.append(self.moment.sequence)


def read(
    configuration: LedgerConfiguration, events: Sequence[SequencedEvent], gap: tuple[int, int] | None = None
) -> tuple[Model, Ends]:
    """Read events, without those of the gap (first and last sequence number)."""
    model = Model(CORE.tables, configuration)
    ends = Ends(model)
    reader = Reader(model, [ends])
    take_with_gap(reader, events, gap)
    reader.finish()
    return model, ends


def walked(seed: int = 7) -> Driver:
    """A walk with every kind of event."""
    return play_seed(seed, 60, chunk_size=16, block_size=16)


def test_each_life_ends_once_after_its_last_event() -> None:
    """A release ends one, and an arrival that takes its id."""
    driver = walked()
    log = list(enumerate(driver.observed, 1))
    _, ends = read(driver.configuration, log)
    released = [(at, event.request_id, event.ordinal) for at, event in log if isinstance(event, e.RequestReleased)]
    assert released
    assert set(released) <= set(ends.ended_at)
    assert len({ordinal for _, _, ordinal in ends.ended_at}) == len(ends.ended_at)
    assert ends.is_finished


@pytest.mark.parametrize("seed", range(3, 9))
def test_behind_a_gap_a_life_is_known_by_its_id_and_generation(seed: int) -> None:
    """As soon as a decision names a life, ordinal and generation are those of the whole log; blocks are not claimed."""
    driver = walked(seed)
    log = list(enumerate(driver.observed, 1))
    gap = len(log) // 4, len(log) // 2
    whole = Model(CORE.tables, driver.configuration)
    reader = Reader(whole, [Ends(whole)])
    partial = Model(CORE.tables, driver.configuration)
    late = Reader(partial, [Ends(partial)])
    num_compared = 0
    for sequence, event in log:
        reader.take([(sequence, event)])
        if sequence == gap[0]:
            late.lost(*gap)
        if gap[0] <= sequence <= gap[1]:
            continue
        late.take([(sequence, event)])
        if sequence < gap[1] or not isinstance(event, e.RequestDecision):
            continue
        expected, found = whole.lives.of(event.ordinal), partial.lives.of(event.ordinal)
        if expected is None or expected.generation != event.generation:
            continue
        assert found is not None
        assert (found.request_id, found.generation) == (expected.request_id, expected.generation)
        if not found.is_partial:
            assert found.path == expected.path
        num_compared += 1
    assert num_compared


def test_a_log_that_begins_late_has_lives_without_a_beginning() -> None:
    """The state of one is empty until an event tells it."""
    configuration = LedgerConfiguration(16, 16, num_slots=4)
    events: list[SequencedEvent] = [
        (40, e.ChunkKeysObserved("late", 0, ())),
        (41, e.RequestPreempted("late", 20, 20, 5)),
    ]
    model = Model(CORE.tables, configuration)
    reader = Reader(model, [Ends(model)])
    reader.lost(1, 39)
    reader.take(events[:1])
    life = model.lives.get("late")
    assert life is not None
    assert (life.is_partial, life.path, life.ordinal) == (True, "", -1)
    reader.take(events[1:])
    assert life.path == "preempted"


@settings(max_examples=100)
@given(log=any_log(), data=st.data())
def test_no_order_of_events_makes_the_model_raise(
    log: tuple[LedgerConfiguration, list[e.Event]], data: st.DataObject
) -> None:
    """Neither with all events nor where some are missing, whatever they say: a log may come from elsewhere."""
    configuration, events = log
    numbered = list(enumerate(events, 1))
    read(configuration, numbered)
    first = data.draw(st.integers(1, max(1, len(events))))
    last = data.draw(st.integers(first, max(first, len(events))))
    read(configuration, numbered, (first, last))
    shuffled = data.draw(st.permutations(events))
    read(configuration, list(enumerate(shuffled, 1)))


def forged(event: e.Event, chance: random.Random, others: Sequence[e.Event]) -> e.Event:
    """The event with another value in one of its fields."""
    name = chance.choice(e.field_names(type(event)))
    value = getattr(event, name)
    if isinstance(value, bool):
        value = not value
    elif isinstance(value, int):
        value = chance.choice([value + 1, max(value - 1, -1), 0, -1, chance.randrange(40), 1 << 40])
    elif isinstance(value, str):
        value = chance.choice(["a", "b", "nobody", ""])
    elif isinstance(value, tuple):
        likewise = [each for each in others if type(each) is type(event)]
        value = chance.choice([(), value[:-1], value + value[:1], value[::-1], getattr(chance.choice(likewise), name)])
    return msgspec.structs.replace(event, **{name: value})


@pytest.mark.parametrize("seed", range(9))
def test_no_forged_decision_makes_the_model_raise(seed: int) -> None:
    """Events that are missing, doubled, moved or changed in one field: a log may come from anywhere."""
    driver = play_seed(seed, 60, chunk_size=(8, 16, 32)[seed % 3], block_size=16)
    chance = random.Random(seed)
    events: list[e.Event] = []
    for event in driver.observed:
        changed = forged(event, chance, driver.observed)
        (written,) = chance.choices([[event], [], [event, event], [changed]], weights=(85, 5, 3, 7))
        events += written
        events += [chance.choice(driver.observed)] * (chance.random() > 0.97)
    numbered = list(enumerate(events, 1))
    read(driver.configuration, numbered)
    read(driver.configuration, numbered, (len(events) // 3, len(events) // 2))


def test_a_second_copy_with_one_job_id_takes_the_place_of_the_first() -> None:
    """No ledger issues it; the life of the first one is preempted all the same."""
    configuration = LedgerConfiguration(16, 16, num_slots=4)
    events: list[e.Event] = [
        e.RequestArrived("a", 0, 40, 1),
        e.RequestArrived("b", 1, 40, 1),
        e.SaveIssued("a", 0, 0, 1, (0,), (0,), (1,), False, False, 2),
        e.SaveIssued("b", 1, 0, 1, (0,), (1,), (2,), False, False, 2),
        e.RequestPreempted("a", 20, 20, 5),
    ]
    model, _ = read(configuration, list(enumerate(events, 1)))
    assert [(job.ordinal, job.lost_at) for _, job in model.copies] == [(1, 0)]
    assert not model.copies.of_life(0)


def test_a_life_that_ends_while_it_decodes_has_its_tokens() -> None:
    """Its id is used again; what it had computed is told to whoever is called at its end."""
    driver = Driver(num_slots=4)
    driver.start("a", (), 20, (1, 2))
    driver.step(("a", 20, 1, 21))
    driver.step()
    numbers: list[int] = []

    class Computed(Visitor[Model]):
        def ended(self, life: Life) -> None:
            numbers.append(self.model.lives.num_computed_tokens(life))

    model = Model(CORE.tables, driver.configuration)
    again = len(driver.observed) + 1, e.RequestArrived("a", 1, 20, 9)
    Reader(model, [Computed(model)]).take([*enumerate(driver.observed, 1), again])
    assert numbers == [22]
    assert model.lives.num_decoding == 0
