"""A state machine that makes the moves of a small world in any order.

A failure is shrunk to few moves, and printed with the log that they lead to.
"""

from __future__ import annotations

import sys
from collections import Counter
from random import Random
from typing import Any, ClassVar

import attrs
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvledger.lifecycle import RequestState, Scheduled
from kvledger.lifecycle import events as e
from lifecycle_driver.driver import Driver
from lifecycle_driver.invariants import num_entries
from lifecycle_driver.world import MAX_PLAYERS, Player, World

THEN = {"num_requests": st.integers(0, 3), "num_steps": st.integers(1, 8)}
"""What follows each move: requests arrive, and steps are made. They are no rules of their own, because Hypothesis
leaves some rules out of each example.
"""


class Drawn:
    """Choices of Hypothesis. They shrink to what does not happen, to the least number and to the first of several."""

    def __init__(self, random: Random) -> None:
        self.randint, self.choice = random.randint, random.choice

    def chance(self, probability: float) -> bool:
        """Whether it happens."""
        return self.randint(0, 99) >= 100 - 100 * probability


@attrs.define
class Met:
    """What the examples of one run have met."""

    events: Counter[type[e.Event]] = attrs.field(factory=Counter)
    """Class -> in how many logs."""
    states: set[RequestState] = attrs.field(factory=set)
    """States of requests between moves."""
    num_loads_checked: int = 0
    num_recovering: int = 0
    """Steps after which a request was recovering."""


class Moves(RuleBasedStateMachine):
    """The moves of a world; Hypothesis draws them, whom they concern and how they happen.

    The world's driver checks slots, blocks and counts after every event, its device the pages of every load and step.
    """

    met: ClassVar[Met]
    world: World

    @initialize(random=st.randoms(), chunk_size=st.sampled_from((8, 16, 32)), save_tails=st.booleans())
    def begin(self, random: Random, chunk_size: int, save_tails: bool) -> None:
        """Draw the settings: chunks of less than a block, of one or of two."""
        self.world = World(Drawn(random), chunk_size=chunk_size, block_size=16, save_tails=save_tails)

    @rule(**THEN)
    def serve(self, num_requests: int, num_steps: int) -> None:
        """Requests arrive, and steps are made."""
        self._go_on(num_requests, num_steps)

    @rule(**THEN)
    def preempt(self, num_requests: int, num_steps: int) -> None:
        """A request loses its blocks."""
        if self.world.running:
            self.world.preempt(self.world.choices.choice(self.world.running))
        self._go_on(num_requests, num_steps)

    @rule(**THEN)
    def abort(self, num_requests: int, num_steps: int) -> None:
        """A client leaves."""
        if self.world.players:
            self.world.finish(self.world.choices.choice(self.world.players))
        self._go_on(num_requests, num_steps)

    @rule(preempts_all=st.booleans(), **THEN)
    def reset(self, preempts_all: bool, num_requests: int, num_steps: int) -> None:
        """The caches are reset, and all running requests are preempted if that is asked for."""
        for player in self.world.running if preempts_all else ():
            self.world.preempt(player)
        self.world.driver.reset()
        self._go_on(num_requests, num_steps)

    def _go_on(self, num_requests: int, num_steps: int) -> None:
        for _ in range(min(num_requests, MAX_PLAYERS - len(self.world.players))):
            self.world.arrive()
        for _ in range(num_steps):
            self.world.step()
            for player in self.recovering:
                self.met.num_recovering += 1
                check_runs(self.world.driver.again(), player)
                check_finishes(self.world.driver.again(), player)

    @property
    def recovering(self) -> list[Player]:
        """Who computes again what a preemption has cost, or loads it."""
        state = self.world.driver.state
        return [player for player in self.world.players if state(player.request_id) is RequestState.RECOVERING]

    @invariant()
    def every_running_request_has_its_blocks(self) -> None:
        """The ledger's table is the scheduler's."""
        self.met.states.update(record.state for record in self.world.driver.projections.tracker)
        for player in self.world.running:
            assert list(self.world.driver.record(player.request_id).block_ids or ()) == player.blocks

    def teardown(self) -> None:
        """When all requests have left nothing is left behind, and the log replays to the same state and decisions."""
        if not hasattr(self, "world"):
            return
        driver = self.world.driver
        try:
            if sys.exc_info()[0] is None:  # otherwise the world is in the middle of a move
                self.world.drain()
                check_end(driver)
                self.met.events.update({type(event) for _, event in driver.sink.events()})
                self.met.num_loads_checked += self.world.num_loads_checked
        finally:
            note("\n".join(map(str, driver.observed)))


def check_runs(driver: Driver, player: Player) -> None:
    """Reports and one step make a recovering request run."""
    driver.settle_all()
    if player.loading:
        driver.allocate(player.request_id, player.blocks)
    num_tokens = len(player.contents)
    driver.schedule(
        Scheduled(player.request_id, player.computed, num_tokens - player.computed, num_tokens, (), player.in_flight)
    )
    assert driver.state(player.request_id) is RequestState.RUNNING, f"{player} does not run"


def check_finishes(driver: Driver, player: Player) -> None:
    """A recovering request can be finished, and is released when its copies are reported."""
    num_computed = driver.projections.tracker.num_computed_tokens(driver.record(player.request_id))
    driver.finish(player.request_id, num_computed, len(player.contents))
    driver.settle_all()
    assert driver.state(player.request_id) is None, f"{player} is not released"


def check_end(driver: Driver) -> None:
    """Check a log at whose end nothing is owed."""
    played = {"COMPLETION_ONCE", "LIVENESS"}  # by doubled and lost reports
    broken = {event.rule for event in driver.all_of(e.InvariantViolated)} - played
    assert not broken, broken
    assert not any(num_entries(driver.projections).values()), num_entries(driver.projections)
    pool = driver.projections.pool
    held = {slot for key in pool for slot in pool.get(key) or ()} | set(driver.given_up_slots())
    assert driver.projections.slots.num_free == driver.configuration.num_slots - len(held)
    assert [event for _, event in driver.events()] == driver.observed
    audit = driver.audited()
    violations = [violation for violation in audit.violations if violation.rule not in {"RECORDED", *played}]
    assert not violations, violations[0]
    assert audit.unfoldable is None
    assert audit.divergences == []
    assert audit.reference_differences == []
    assert audit.projections.snapshot() == driver.projections.snapshot()


def explore(**options: Any) -> Met:
    """Play examples of moves, with these options of `hypothesis.settings`; returns what they have met."""
    met = Met()
    machine = type("Moves", (Moves,), {"met": met})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=20, deadline=None, **options))
    return met
