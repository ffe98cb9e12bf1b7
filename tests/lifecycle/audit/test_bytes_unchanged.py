"""BYTES_UNCHANGED names the first block whose bytes are others than they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from lifecycle_driver import Driver, keys_of

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Violation

SAVED = (11, 12)


class Story:
    """`a` saves two chunks of two blocks, `b` comes with the same tokens and loads them."""

    def __init__(self) -> None:
        self.driver = Driver(chunk_size=32, block_size=16, num_slots=16)
        self.keys = keys_of("a", 2)
        self.driver.start("a", self.keys, 65, range(1, 6))

    def digested(
        self,
        request_id: str,
        digests: Sequence[int],
        *,
        is_load: bool = False,
        stored: Sequence[int] | None = None,
        first_block: int = 0,
        rank: int = 0,
        group: int = 0,
    ) -> None:
        """A worker's word."""
        life = self.driver.record(request_id).life
        stored = (digests if stored is None else stored) if is_load else ()
        self.driver.observe(e.PagesDigested(*life, rank, is_load, group, first_block, tuple(digests), tuple(stored), 7))

    def saved(self, digests: Sequence[int] = SAVED, **more: int) -> Story:
        """`a` has saved."""
        self.digested("a", digests, **more)
        return self

    def second(self) -> Story:
        """`b` is there, with the same beginning."""
        self.driver.finish("a", 64, 66)
        self.driver.settle_all()
        self.driver.start("b", self.keys, 65, range(11, 16))
        return self

    def loaded(self, digests: Sequence[int] = SAVED, stored: Sequence[int] | None = None, **more: int) -> Story:
        """`b` has loaded."""
        self.digested("b", digests, is_load=True, stored=stored, **more)
        return self

    def found(self) -> list[Violation]:
        """By this rule."""
        return [violation for violation in self.driver.audited().violations if violation.rule == "BYTES_UNCHANGED"]


def test_what_was_saved_may_be_loaded() -> None:
    """The same digests at the same places."""
    assert Story().saved().second().loaded().found() == []


@pytest.mark.parametrize(
    ("digests", "stored", "words"),
    [
        ((11, 13), (11, 12), "block 1 .* host memory had 0{15}c, but the device has 0{15}d after the load"),
        ((11, 13), (11, 13), "block 1 .* saved as 0{15}c; at the load, host memory had 0{15}d"),
        ((11, 13), (), "block 1 .* saved as 0{15}c; after the load, the device has 0{15}d"),
        ((12, 11), (12, 11), "block 0 .* saved as 0{15}b; at the load, host memory had 0{15}c"),
        ((-1, 12), (11, 12), "block 0 .* the device has ffffffffffffffff"),
    ],
)
def test_the_first_other_block_is_named_with_where_it_changed(
    digests: tuple[int, ...], stored: tuple[int, ...], words: str
) -> None:
    """In the host's memory, or on the way into the block."""
    (violation,) = Story().saved().second().loaded(digests, stored).found()
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(violation.detail)
    assert violation.request_id == "b"


def test_any_of_several_saves_of_the_same_tokens_is_right() -> None:
    """They were computed twice, and may differ in the last bits."""
    story = Story().saved().second()
    story.digested("b", (21, 22))
    story.driver.start("c", story.keys, 65, range(21, 26))
    story.digested("c", (21, 12), is_load=True)
    assert story.found() == []


def test_what_an_ended_request_left_behind_may_be_saved_later() -> None:
    """By connectors that save what is free and still cached; its tokens are known."""
    story = Story()
    story.digested("a", (11,))
    life = story.driver.record("a").life
    story.second()
    assert story.driver.projections.tracker.get("a") is None
    story.driver.observe(e.PagesDigested(*life, 0, False, 0, 1, (12,), (), 7))
    (violation,) = story.loaded((11, 13)).found()
    assert "block 1 of the table, group 0, rank 0: was saved as 000000000000000c" in violation.detail


@pytest.mark.parametrize("more", [{"rank": 1}, {"group": 1}, {"first_block": 2}])
def test_nothing_is_said_of_pages_that_were_not_digested_before(more: dict[str, int]) -> None:
    """Of another rank, another group, another place."""
    assert Story().saved().second().loaded((1, 2), **more).found() == []


def test_a_reset_forgets_what_was_saved() -> None:
    """The weights may be others."""
    story = Story().saved()
    story.driver.reset()
    assert story.second().loaded((1, 2)).found() == []


def test_what_a_request_from_before_a_reset_saves_after_it_may_be_loaded() -> None:
    """It lost its blocks and computed them again (world 700020: the rule knew only another save)."""
    story = Story()
    story.driver.reset()
    story.driver.start("b", story.keys, 65, range(11, 16))
    story.digested("b", (21, 22))
    story.digested("a", SAVED)
    story.driver.start("c", story.keys, 65, range(21, 26))
    story.digested("c", SAVED, is_load=True)
    assert story.found() == []


def test_nothing_is_said_of_a_chunk_whose_digests_were_lost_with_a_report() -> None:
    """Only the save of old weights had its digests in the log (world 790682)."""
    story = Story().saved()
    story.driver.finish("a", 64, 66)
    for save in story.driver.all_of(e.SaveIssued):
        story.driver.report(save.job_id, is_repeated=True)
    story.driver.start("b", story.keys, 65, range(11, 16))
    assert story.loaded((1, 2)).found() == []


def test_a_full_block_stays_as_it_is() -> None:
    """Between two digests of one life, until it loses its blocks."""
    story = Story().saved()
    story.digested("a", (12,), first_block=1)
    story.digested("a", (13,), first_block=1)
    (violation,) = story.found()
    assert "is now 000000000000000d and was 000000000000000c" in violation.detail


@pytest.mark.parametrize("lose", [lambda driver: driver.preempt("a", 64), lambda driver: driver.roll_back("a", 32)])
def test_what_is_computed_anew_may_be_another(lose: Callable[[Driver], object]) -> None:
    """After a preemption, and after a rollback."""
    story = Story().saved()
    lose(story.driver)
    story.digested("a", (13,), first_block=1)
    assert story.found() == []
