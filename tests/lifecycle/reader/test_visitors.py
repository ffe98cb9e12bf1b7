"""When visitors are called, and what the model tells them about the time before an observation."""

from __future__ import annotations

import pytest
from lifecycle_driver import Driver, play_seed

from kvledger.lifecycle import Core, SequencedEvent
from kvledger.lifecycle import events as e
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader import Model, Reader, Visitor
from kvledger.lifecycle.replay import batches

CORE = Core.standard()


class Decided(Visitor[Model]):
    """Collects what the model says whenever everything upon an observation is decided."""

    needs = ("lives", "copies")

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.last_sequences: list[int] = []
        self.paths: list[dict[int, tuple[str, str]]] = []
        """Ordinal → path before the observation and after it."""
        self.num_open: list[int] = []
        self.num_tokens: dict[int, int] = {}

    def decided(self) -> None:
        """Ask."""
        lives = self.model.lives
        self.last_sequences.append(self.moment.sequence)
        self.paths.append({life.ordinal: (lives.path_before_observation(life), life.path) for life in lives})
        self.num_open.append(lives.num_open)

    @on(e.LoadIssued, e.SaveIssued, e.TailSaveIssued)
    def _issued(self, event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued) -> None:
        job = self.model.copies.get(event.job_id)
        assert job is not None
        self.num_tokens[event.job_id] = job.num_tokens


def read(driver: Driver, frames: list[list[SequencedEvent]]) -> Decided:
    """Read these frames."""
    model = Model(CORE.tables, driver.configuration)
    visitor = Decided(model)
    reader = Reader(model, [visitor])
    for frame in frames:
        reader.take(frame)
    return visitor


def walked(seed: int) -> tuple[Driver, list[list[SequencedEvent]]]:
    """A walk, and its observations with everything that was decided upon each."""
    driver = play_seed(seed, 60, chunk_size=16, block_size=16)
    return driver, list(batches(enumerate(driver.observed, 1)))


@pytest.mark.parametrize("seed", range(3, 8))
def test_the_state_before_an_observation_is_the_one_after_the_one_before(seed: int) -> None:
    """As the projections tell it, whatever was decided upon it; a life that begins has none before."""
    driver, observations = walked(seed)
    visitor = read(driver, observations)
    projections = CORE.new_projections(driver.configuration)
    for observation, found, num_open in zip(observations, visitor.paths, visitor.num_open, strict=True):
        before = {record.ordinal: record.path for record in projections.tracker}
        for sequence, event in observation:
            projections.fold(event, sequence)
        after = {record.ordinal: record.path for record in projections.tracker}
        assert found == {ordinal: (before.get(ordinal, ""), path) for ordinal, path in after.items()}
        assert num_open == sum(path != "finished" for path in after.values())
    assert any(before != after for found in visitor.paths for before, after in found.values() if before)


def test_a_visitor_is_called_once_for_each_observation_however_the_log_is_cut_into_frames() -> None:
    """After the last decision upon it."""
    driver, observations = walked(3)
    one_by_one = read(driver, observations)
    assert one_by_one.last_sequences == [observation[-1][0] for observation in observations]
    at_once = read(driver, [[event for observation in observations for event in observation]])
    assert (at_once.last_sequences, at_once.paths) == (one_by_one.last_sequences, one_by_one.paths)


def test_a_copy_says_how_many_tokens_it_is_of() -> None:
    """A save of chunks does not: they say it."""
    driver, observations = walked(3)
    visitor = read(driver, observations)
    issued = [event for event in driver.observed if isinstance(event, e.LoadIssued | e.SaveIssued | e.TailSaveIssued)]
    assert {type(event) for event in issued} >= {e.LoadIssued, e.SaveIssued}
    assert visitor.num_tokens == {event.job_id: getattr(event, "num_tokens", 0) for event in issued}
