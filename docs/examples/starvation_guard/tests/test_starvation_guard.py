"""Tests what the guard does, and that it fulfils the contract of every extension."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import msgspec
from starvation_guard import StarvationGuard, Starving

from kvledger.lifecycle import Core, LedgerConfiguration, Projections
from kvledger.lifecycle import events as e
from kvledger.lifecycle.testing import ExtensionContract, Play


class Careless(StarvationGuard):
    """Decides which requests are starving, but keeps none of their chunks."""

    def keeps(self, _projections: Projections, _key: bytes) -> bool:
        """Keep nothing."""
        return False


class TestStarvationGuard(ExtensionContract):
    """The contract, with a limit that more requests reach than the default."""

    settings: ClassVar[dict[str, int]] = {"num_preemptions": 1}

    def make_extension(self) -> StarvationGuard:
        """Return a new extension."""
        return StarvationGuard()

    def payloads(self) -> Iterable[msgspec.Struct]:
        """Return its one event."""
        return [Starving(1)]

    def bad_log(self, _rule: str) -> Play:
        """Return a play in which the pool needs room and the chunks of starving requests are the oldest."""
        return self.walked(Careless())


def test_a_request_starves_from_the_preemption_in_the_setting_on() -> None:
    """By default from the second one on, with an event for each preemption."""
    configuration = LedgerConfiguration(block_size=4, chunk_size=4, num_slots=8)
    play = Play(Core.standard().extended(StarvationGuard()), configuration)
    play.walk()
    decided = [event for event in play.events if isinstance(event, e.ExtensionDecided)]
    assert [(event.request_id, StarvationGuard.payload_of(event)) for event in decided[:3]] == [
        ("walker 2", Starving(2)),
        ("walker 3", Starving(2)),
        ("walker 3", Starving(3)),
    ]
