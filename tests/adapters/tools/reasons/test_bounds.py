"""The accounts stay small however long the log is, and say what they left out."""

from __future__ import annotations

from lifecycle_driver import Driver, keys_of
from lifecycle_driver.concerned import stories_of

from kvledger.adapters.tools.reasons import Reason
from kvledger.adapters.tools.reasons.chunk_history import ChunkFact, ChunkHistory, ChunkStatus
from kvledger.adapters.tools.reasons.request_history import MAX_KEPT


def test_of_chunks_that_are_gone_the_latest_are_remembered() -> None:
    """What is in the pool is never forgotten."""
    history = ChunkHistory(max_gone=2)
    kept, *others = keys_of("a", 4)
    history.save_issued([kept], ChunkFact(ChunkStatus.SAVING, 1, "a", 0, job_id=1))
    history.save_settled([kept], 1, ChunkStatus.SAVED, 2, 2, "")
    for sequence, key in enumerate(others, 3):
        history.left(key, ChunkFact(ChunkStatus.EVICTED, sequence, "b"))
    assert [history.get(key) is None for key in others] == [True, False, False]
    fact = history.get(kept)
    assert fact is not None
    assert fact.status is ChunkStatus.SAVED


def test_of_a_recorded_connector_s_chunks_the_latest_are_remembered() -> None:
    """It does not say when it evicts, so that its pool seems to grow for ever."""
    history = ChunkHistory(max_gone=8)
    keys = keys_of("a", 12)
    for sequence, key in enumerate(keys, 1):
        history.save_issued([key], ChunkFact(ChunkStatus.SAVED, sequence, "a"))
        history.forget_oldest()
    assert [key for key in keys if history.get(key) is not None] == list(keys[4:])
    assert history.has_forgotten


def test_a_very_long_story_keeps_its_beginning_and_its_end_and_counts_the_rest() -> None:
    """The totals count everything all the same."""
    driver = Driver(num_slots=4)
    driver.arrive("a", 17, keys_of("a", 2))
    for number in range(MAX_KEPT + 20):
        driver.lookup("a", 0, 17 + number)
    driver.ledger.commit()
    (story,) = stories_of(driver.sink.events(), driver.configuration)
    assert len(story.lookups) == MAX_KEPT
    assert story.num_left_out == 20
    last = story.lookups[-1].spans[-1]
    assert (last.first_token, last.reason) == (17 + MAX_KEPT + 18, Reason.LAST_TOKEN)


def test_the_stories_of_ended_lives_are_not_kept() -> None:
    """Whoever wants them is given each once, when it is over."""
    driver = Driver()
    for name in "abc":
        driver.save_prefix(name, keys_of(name, 2))
    driver.arrive("d", 9)
    driver.ledger.commit()
    stories = stories_of(driver.sink.events(), driver.configuration)
    assert [story.request_id for story in stories] == ["a", "b", "c", "d"]
