"""The order in which chunks may leave: that of a plain list, of which each use moves a whole prefix to the end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import pytest
from lifecycle_driver import Driver, keys_of, play_seed

from kvledger.lifecycle import Core, LedgerConfiguration
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Audit, AuditModel, Checker, Visits

NOBODY = -1


class PlainOrder(Checker):
    """The plain list, at the length of the prompts for each use; compared with the audit's after every event."""

    rule = "PLAIN_ORDER"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self.order: dict[bytes, None] = {}
        self.num_compared = 0

    def visits(self) -> Visits:
        """All events."""
        return [(event_class, self._look) for event_class in e.STANDARD_EVENTS.values()]

    def _look(self, event: e.Event) -> None:
        job = self.copies.current
        if isinstance(event, e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed):
            if job is not None and job.epoch == self.copies.epoch:
                self._use(job.prefix.keys[: job.prefix.num_chunks])
        elif isinstance(event, _ENDS):
            for prefix in self.answers.let_go:
                self._use(prefix.keys[: prefix.num_chunks])
        if isinstance(event, e.RequestPreempted | e.RequestFinished) and self.moment.life is not None:
            self._use(self.moment.life.keys)
        self.order = {key: None for key in self.order if key in self.chunks}
        held = self.room.relied_on()
        expected = [key for key in self.order if key not in held]
        assert list(self.room.leaving(NOBODY)) == expected, f"after event {self.moment.sequence}, {event.id}"
        self.num_compared += len(expected)

    def _use(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self.order.pop(key, None)
            self.order[key] = None


_ENDS = (
    *(e.LookupAnswered, e.LookupDeferred, e.DecisionWithheld, e.BlocksAllocated, e.SessionContinued),
    *(e.RequestPreempted, e.RequestFinished, e.RequestArrived, e.RequestReleased),
)


def compared(events: Sequence[e.Event], configuration: LedgerConfiguration) -> int:
    """How many chunks were found to be in the same places."""
    audit = Audit(Core.standard(), configuration, checkers=[PlainOrder])
    audit.run(enumerate(events, 1))
    assert audit.unfoldable is None, audit.unfoldable
    (checker,) = audit.checkers
    assert isinstance(checker, PlainOrder)
    return checker.num_compared


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 30))])
@pytest.mark.parametrize(("chunk_size", "block_size"), [(8, 16), (16, 16)])
def test_it_is_the_order_of_a_plain_list(seed: int, chunk_size: int, block_size: int) -> None:
    """In random worlds, after every event."""
    driver = play_seed(seed, 60, chunk_size=chunk_size, block_size=block_size)
    assert compared(driver.observed, driver.configuration)


def taking_turns(num_turns: int) -> Driver:
    """Requests that share a beginning and go on differently read and grow in turns, in a pool that is too small."""
    shared = keys_of("shared", 3)
    driver = Driver(chunk_size=16, num_slots=14, save_tails=False, async_saves=True)
    for turn, number in zip(range(num_turns), cycle((0, 1, 2, 1, 0, 0, 3)), strict=False):
        num_chunks = 4 + turn % 4
        keys, num_tokens = (*shared, *keys_of(f"its {number}", num_chunks - 3)), 16 * num_chunks
        driver.start(f"turn {turn}", keys, num_tokens + 1, range(1, num_chunks + 2), num_computed=16 * (turn % 3))
        driver.step(settled=[(f"turn {turn}", 0, num_tokens)])
        if turn % 2:
            driver.settle_all()
        driver.finish(f"turn {turn}", num_tokens + 1, num_tokens + 2)
        driver.settle_all()
    driver.ledger.commit()
    return driver


def test_requests_that_share_a_beginning_and_take_turns_are_told_apart() -> None:
    """Each takes the beginning over from the others, again and again."""
    driver = taking_turns(40)
    assert len(driver.all_of(e.ChunksEvicted)) > 10
    assert driver.audited().violations == []
    assert compared(driver.observed, driver.configuration)


def test_what_it_remembers_is_bounded_by_the_pool() -> None:
    """A use is forgotten when others have used all of its chunks since, or none of them is there any more."""
    driver = taking_turns(200)
    audit = driver.audited()
    room = audit.checkers[0].room
    sizes = {name: len(value) for name, value in vars(room).items() if isinstance(value, dict)}
    assert max(sizes.values()) <= driver.configuration.num_slots, sizes
    driver.reset()
    room = driver.audited().checkers[0].room
    assert not any(value for value in vars(room).values() if isinstance(value, dict))
