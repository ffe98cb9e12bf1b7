"""What the guard does, and that it keeps what every extension must."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import msgspec
from starvation_guard import StarvationGuard, Starving

from kvledger.lifecycle import Core, LedgerConfiguration, Projections
from kvledger.lifecycle import events as e
from kvledger.lifecycle.testing import ExtensionContract, Play


class Careless(StarvationGuard):
    """Says who is starving, and keeps nothing."""

    def keeps(self, _projections: Projections, _key: bytes) -> bool:
        """Nothing."""
        return False


class TestStarvationGuard(ExtensionContract):
    """With a limit that more requests reach than by default."""

    settings: ClassVar[dict[str, int]] = {"num_preemptions": 1}

    def make_extension(self) -> StarvationGuard:
        """A new one."""
        return StarvationGuard()

    def payloads(self) -> Iterable[msgspec.Struct]:
        """Its one event."""
        return [Starving(1)]

    def bad_log(self, _rule: str) -> Play:
        """The pool needs room, and those who starve are the oldest in it."""
        return self.walked(Careless())


def test_a_request_starves_from_the_preemption_on_that_the_setting_says() -> None:
    """It says so each time; the second one, by default."""
    configuration = LedgerConfiguration(block_size=4, chunk_size=4, num_slots=8)
    play = Play(Core.standard().extended(StarvationGuard()), configuration)
    play.walk()
    said = [event for event in play.events if isinstance(event, e.ExtensionDecided)]
    assert [(event.request_id, StarvationGuard.payload_of(event)) for event in said[:3]] == [
        ("walker 2", Starving(2)),
        ("walker 3", Starving(2)),
        ("walker 3", Starving(3)),
    ]
