"""What the reader knows where events are missing: lives go on, and nothing is claimed that cannot be known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lifecycle_driver import Driver, play_seed
from lifecycle_driver.any_events import any_log

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
    for sequence, event in events:
        if gap is not None and sequence == gap[0]:
            reader.lost(*gap)
        if gap is None or not gap[0] <= sequence <= gap[1]:
            reader.take([(sequence, event)])
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


@settings(max_examples=200)
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
