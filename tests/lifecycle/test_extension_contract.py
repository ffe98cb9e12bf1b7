"""The contract for extensions finds what it says that it verifies; the example keeps it (its own tests show that)."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any, ClassVar

import msgspec
import pytest
from starvation_guard import StarvationGuard, Starving, StarvingKept, StarvingRequests, Watching

from kvledger.lifecycle import Extension, Projections, ProjectionSpec, RequestState, Turn
from kvledger.lifecycle import events as e
from kvledger.lifecycle.testing import ExtensionContract, Play


def altered(**parts: Any) -> type[Extension]:
    """The guard with other parts."""
    return type("Altered", (StarvationGuard,), parts)


class Remembers(StarvingRequests):
    """Counts beside its state."""

    def __init__(self) -> None:
        super().__init__()
        self._num_said = 0

    def _starves(self, event: e.ExtensionDecided, sequence: int) -> None:
        self._num_said += 1
        super()._starves(event, sequence)
        self.state.starving[event.ordinal] += str(self._num_said)


class Raises(Watching):
    """Cannot do without tokens."""

    state = RequestState.RUNNING

    def request_preempted(self, turn: Turn, event: e.RequestPreempted) -> None:
        """Divide by them."""
        turn.decide(StarvationGuard.decided(turn, Starving(1 // event.num_settled_tokens)))


class Once(Watching):
    """Decides only the first time that it is asked."""

    state = RequestState.RUNNING
    was_asked = False

    def request_preempted(self, turn: Turn, event: e.RequestPreempted) -> None:
        """Remember that."""
        if not Once.was_asked:
            super().request_preempted(turn, event)
        Once.was_asked = True


class OnceEach(Watching):
    """Decides once and remembers it itself, each of them."""

    state = RequestState.RUNNING

    def __init__(self) -> None:
        self._was_asked = False

    def request_preempted(self, turn: Turn, event: e.RequestPreempted) -> None:
        """What it decides hangs on how often it was asked."""
        if not self._was_asked:
            super().request_preempted(turn, event)
        self._was_asked = True


class Accuses(StarvingKept):
    """Finds fault with every eviction."""

    def _evicted(self, _event: e.ChunksEvicted) -> None:
        self.broken("")


class CannotJudge(StarvingKept):
    """Fails at every eviction."""

    def _evicted(self, _event: e.ChunksEvicted) -> None:
        raise KeyError


class Overlooks(StarvingKept):
    """Finds nothing."""

    def _evicted(self, _event: e.ChunksEvicted) -> None:
        return None


class KeepsByChance:
    """Keeps a chunk or not as a die falls."""

    def __init__(self) -> None:
        self._draw = Random(1)

    def __call__(self, _projections: Projections, _key: bytes) -> bool:
        """Throw it."""
        return self._draw.random() < 0.5


class Contract(ExtensionContract):
    """What `extension` keeps of it."""

    __test__ = False
    settings: ClassVar[dict[str, int]] = {"num_preemptions": 1}

    def __init__(self, extension: type[Extension], payloads: Iterable[msgspec.Struct] = (Starving(1),)) -> None:
        self._extension = extension
        self._payloads = payloads

    def make_extension(self) -> Extension:
        """A new one."""
        return self._extension()

    def payloads(self) -> Iterable[msgspec.Struct]:
        """Those that were given."""
        return self._payloads

    def bad_log(self, _rule: str) -> Play:
        """Nothing is kept."""
        return self.walked(altered(keeps=lambda _extension, _projections, _key: False)())


class KeepsNothingRight:
    """Says something that is neither true nor false."""

    def __call__(self, _projections: Projections, _key: bytes) -> Any:
        """Itself."""
        return self

    def __bool__(self) -> bool:
        """As an array does."""
        raise ValueError


FOLDS = "test_what_it_folds_follows_from_the_log_and_from_a_snapshot_in_its_middle"
DECIDES = "test_it_decides_what_it_may_in_every_state_and_the_same_again"


@pytest.mark.parametrize(
    ("extension", "test", "message"),
    [
        (altered(projections=(ProjectionSpec("starving", lambda _its: Remembers()),)), FOLDS, "starving differ"),
        (altered(keeps=KeepsByChance()), FOLDS, "other chunks are kept"),
        (altered(handlers=(Raises,)), DECIDES, "Raises.request_preempted"),
        (altered(keeps=KeepsNothingRight()), FOLDS, "where='keeps'"),
        (altered(handlers=(Once,)), DECIDES, "this code decides nothing"),
        (altered(handlers=(OnceEach,)), DECIDES, "this code decides"),
        (altered(rules={StarvingKept.rule: Accuses}), "test_its_rules_are_silent_where_all_is_well", "STARVING_KEPT"),
        (
            altered(rules={StarvingKept.rule: CannotJudge}),
            "test_its_rules_are_silent_where_all_is_well",
            "its checker raised KeyError",
        ),
        (
            altered(rules={StarvingKept.rule: Overlooks}),
            "test_each_of_its_rules_finds_what_breaks_it",
            "STARVING_KEPT finds nothing",
        ),
        (
            altered(settings={}),
            "test_settings_that_it_does_not_have_are_refused",
            "starvation has no settings; remove num_preemptions",
        ),
    ],
    ids=[
        "projection",
        "order",
        "raises",
        "keeps",
        "memory",
        "memories",
        "accuses",
        "cannot judge",
        "overlooks",
        "settings",
    ],
)
def test_what_breaks_the_contract_is_found(extension: type[Extension], test: str, message: str) -> None:
    """By the test that says so, with what is wrong."""
    Once.was_asked = False
    with pytest.raises((AssertionError, ValueError), match=message):
        getattr(Contract(extension), test)()


def test_an_event_that_is_not_tried_and_a_rule_that_nothing_breaks_are_named() -> None:
    """Otherwise nobody would notice what is not verified."""
    with pytest.raises(AssertionError, match="`payloads` does not return every event"):
        Contract(StarvationGuard, ()).test_its_events_are_read_back_with_it_and_unpacked_without_it()
    with pytest.raises(NotImplementedError, match="STARVING_KEPT: there is no log that breaks this rule"):
        ExtensionContract.bad_log(Contract(StarvationGuard), "STARVING_KEPT")
