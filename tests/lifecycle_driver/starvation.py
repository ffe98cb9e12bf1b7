"""An extension as somebody else would write it: who is preempted too often is starving, and its chunks are kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, ClassVar

import msgspec

from kvledger.lifecycle import Extension, Projections, RequestState, StateHandler, Turn
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Violation


class Starving(msgspec.Struct, frozen=True):
    """A request was preempted as often as is called starving."""

    num_preemptions: int


class Guard(StateHandler):
    """Says which requests are starving."""

    state = RequestState.RUNNING

    def request_preempted(self, turn: Turn, _event: e.RequestPreempted) -> None:
        """Count."""
        limit = StarvationGuard.setting(turn.projections.configuration, "num_preemptions")
        if turn.record.num_preemptions >= limit:
            turn.decide(StarvationGuard.decided(turn, Starving(turn.record.num_preemptions)))


class StarvingIsTrue:
    """Nobody is called starving who was preempted less often than the event says."""

    rule: ClassVar[str] = "STARVING_IS_TRUE"
    looks_at: ClassVar[frozenset[type[e.Event]]] = frozenset({e.RequestPreempted, e.ExtensionDecided})

    def __init__(self) -> None:
        self._num_preemptions: dict[str, int] = {}

    def check(self, step: Any, _projections: Projections) -> Iterable[Violation] | None:
        """Count again."""
        event = step.event
        if isinstance(event, e.RequestPreempted):
            self._num_preemptions[event.request_id] = self._num_preemptions.get(event.request_id, 0) + 1
            return None
        said = StarvationGuard.payload_of(event)
        return None if not isinstance(said, Starving) else self._judged(said, step)

    def _judged(self, said: Starving, step: Any) -> Iterator[Violation]:
        counted = self._num_preemptions.get(step.event.request_id, 0)
        if counted < said.num_preemptions:
            yield Violation(self.rule, step.sequence, step.event.request_id, None, f"preempted {counted} times", ())


class StarvationGuard(Extension):
    """Keeps the chunks of starving requests before all others."""

    name = "starvation"
    events: ClassVar[dict[str, type[msgspec.Struct]]] = {"starving": Starving}
    rows = (
        ("preempted", "starvation/starving", "preempted.starving"),
        ("preempted.starving", "blocks.allocated", "recovering.starving"),
    )
    handlers = (Guard,)
    rules: ClassVar[dict[str, Any]] = {"STARVING_IS_TRUE": StarvingIsTrue}
    settings: ClassVar[dict[str, int]] = {"num_preemptions": 2}

    def kept(self, projections: Projections) -> Collection[bytes]:
        """All keys of starving requests."""
        starving = [record.request_id for record in projections.tracker if record.sub == "starving"]
        return frozenset(key for request_id in starving for key in projections.chunk_keys.of(request_id))
