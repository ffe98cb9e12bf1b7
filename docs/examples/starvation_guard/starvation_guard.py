"""An extension of kvledger: a request that is preempted too often starves, and its chunks are evicted last."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from kvledger.lifecycle import Extension, Projection, Projections, ProjectionSpec, RequestState, StateHandler, Turn, on
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import AuditModel, Checker


class Starving(msgspec.Struct, frozen=True):
    """The event: a request was preempted again, and at least as often as the setting says."""

    num_preemptions: int


class Watching(StateHandler):
    """Decides which requests are starving."""

    def request_preempted(self, turn: Turn, _event: e.RequestPreempted) -> None:
        """Decide the event. The record has already counted this preemption."""
        num_preemptions = turn.record.num_preemptions
        if num_preemptions >= StarvationGuard.setting(turn.projections.configuration, "num_preemptions"):
            turn.decide(StarvationGuard.decided(turn, Starving(num_preemptions)))


class State(msgspec.Struct):
    """The state of `StarvingRequests`."""

    starving: dict[int, str] = {}
    """Ordinal → request id, from the event until that life of the request ends."""


class StarvingRequests(Projection):
    """The projection: the starving requests."""

    def __init__(self) -> None:
        self.state = State()

    def __len__(self) -> int:
        return len(self.state.starving)

    @on(e.ExtensionDecided)
    def _starves(self, event: e.ExtensionDecided, _sequence: int) -> None:
        if isinstance(StarvationGuard.payload_of(event), Starving):
            self.state.starving[event.ordinal] = event.request_id

    @on(e.RequestFinished, e.RequestArrived)
    def _ended(self, event: e.RequestEvent, _sequence: int) -> None:
        for ordinal in [ordinal for ordinal, name in self.state.starving.items() if name == event.request_id]:
            del self.state.starving[ordinal]


class StarvingKept(Checker):
    """STARVING_KEPT: no chunk of a starving request is evicted while a chunk of no starving request could be.

    Verifies: this for every eviction, with the audit's own state, not with the projection above.
    Does not verify: that the request is starving.
    """

    rule = "STARVING_KEPT"

    def __init__(self, model: AuditModel) -> None:
        super().__init__(model)
        self._starving: dict[int, int] = {}
        """Ordinal → sequence number of its last event."""

    def begin(self) -> None:
        """Take the starving requests from the model if the audit starts in the middle of a log."""
        self._starving |= {life.ordinal: 0 for life in self.lives if life.sub_state == "starving"}

    @on(Starving)
    def _starves(self, _starving: Starving) -> None:
        if self.moment.life is not None:
            self._starving[self.moment.life.ordinal] = self.moment.sequence

    @on(e.RequestReleased)
    def _ended(self, event: e.RequestReleased) -> None:
        self._starving.pop(event.ordinal, None)

    @on(e.ChunksEvicted)
    def _evicted(self, event: e.ChunksEvicted) -> None:
        lives = [life for ordinal in self._starving if (life := self.lives.of(ordinal))]
        kept_for = {key: life for life in lives if life.state is not RequestState.FINISHED for key in life.keys}
        evicted = next((key for key in event.keys if key in kept_for), None)
        if evicted is None:
            return
        life, evicting = kept_for[evicted], self.lives.of(event.ordinal)
        # All stored chunks, except those of starving requests, of the request that saves, and those in use.
        could_go = self.chunks.committed.keys() - kept_for.keys() - self.room.relied_on()
        could_go -= set(evicting.keys if evicting else ())
        if could_go:
            request_id, sequence = life.request_id, self._starving[life.ordinal]
            detail = (
                f"chunk {evicted.hex()} of the starving request {request_id!r} was evicted, though chunk "
                f"{min(could_go).hex()} could have been"
            )
            self.broken(detail, sequence, event.cause, request_id=request_id)


class StarvationGuard(Extension):
    """Evicts the chunks of starving requests last."""

    name = "starvation"
    events: ClassVar[dict[str, type[msgspec.Struct]]] = {"starving": Starving}
    rows = (
        ("preempted", "starvation/starving", "preempted.starving"),
        ("preempted.starving", "blocks.allocated", "recovering.starving"),
    )
    handlers = tuple(
        type(f"Watching{state.title()}", (Watching,), {"state": state})
        for state in (RequestState.NEW, RequestState.CHUNKED_PREFILL, RequestState.RUNNING, RequestState.RECOVERING)
    )
    projections = (ProjectionSpec("starving", lambda _its: StarvingRequests()),)
    rules: ClassVar[dict[str, Any]] = {StarvingKept.rule: StarvingKept}
    settings: ClassVar[dict[str, int]] = {"num_preemptions": 2}

    def keeps(self, projections: Projections, key: bytes) -> bool:
        """Whether the key is of a chunk of a starving request."""
        starving = projections.starving.state.starving  # type: ignore[attr-defined]
        records = (projections.tracker.of(ordinal) for ordinal in starving)
        return any(key in record.keys for record in records if record is not None)
