"""An extension of kvledger: who is preempted too often is starving, and its chunks are kept before all others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar

import msgspec

from kvledger.lifecycle import Extension, Projections, ProjectionSpec, RequestState, StateHandler, Turn
from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit import Check, Model, Moment, Start, Violation


class Starving(msgspec.Struct, frozen=True):
    """The event: a request was preempted for the n-th time, n being at least what the setting says."""

    num_preemptions: int


class Watching(StateHandler):
    """Says which requests are starving."""

    def request_preempted(self, turn: Turn, _event: e.RequestPreempted) -> None:
        """The record counts this preemption already."""
        num_preemptions = turn.record.num_preemptions
        if num_preemptions >= StarvationGuard.setting(turn.projections.configuration, "num_preemptions"):
            turn.decide(StarvationGuard.decided(turn, Starving(num_preemptions)))


class State(msgspec.Struct):
    """All that `StarvingRequests` remembers."""

    starving: dict[str, int] = {}
    """Request id -> how often it was preempted; from the event until it ends."""


class StarvingRequests:
    """The projection of who is starving."""

    def __init__(self) -> None:
        self.state = State()

    def __len__(self) -> int:
        return len(self.state.starving)

    def folds(self) -> Mapping[type[e.Event], Callable[..., None]]:
        """By class of event."""
        return {e.ExtensionDecided: self._said, e.RequestFinished: self._ended, e.RequestArrived: self._ended}

    def _said(self, event: e.ExtensionDecided, _sequence: int) -> None:
        said = StarvationGuard.payload_of(event)
        if isinstance(said, Starving):
            self.state.starving[event.request_id] = said.num_preemptions

    def _ended(self, event: e.RequestEvent, _sequence: int) -> None:
        self.state.starving.pop(event.request_id, None)


class StarvingKept:
    """STARVING_KEPT: no chunk of a starving request is evicted while one could be that is nobody's who starves.

    Verifies: this for every eviction, with what the audit folds itself, not with the projection above.
    Does not verify: who is called starving; chunks smaller than a block, which may share one.
    """

    rule: ClassVar[str] = "STARVING_KEPT"

    def begin(self, start: Start) -> None:
        """Take over who is starving where an audit starts in the middle of a log."""
        self._starving |= dict.fromkeys(start.of_extensions["starving"].starving, 0)  # type: ignore[attr-defined]

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._model = model
        self._starving: dict[str, int] = {}
        """Request id -> event that said so."""
        ends = ((event, self._ended) for event in (e.RequestFinished, e.RequestArrived))
        return [(e.ExtensionDecided, self._said), *ends, (e.ChunkEvicted, self._evicted)]

    def _said(self, event: e.ExtensionDecided, moment: Moment) -> None:
        if isinstance(StarvationGuard.payload_of(event), Starving):
            self._starving[event.request_id] = moment.sequence

    def _ended(self, event: e.RequestEvent, _moment: Moment) -> None:
        self._starving.pop(event.request_id, None)

    def _evicted(self, event: e.ChunkEvicted, moment: Moment) -> list[Violation] | None:
        model = self._model
        kept_for = {key: who for who in self._starving if (life := model.lives.get(who)) for key in life.keys}
        if event.key not in kept_for:
            return None
        who, evicting = kept_for[event.key], model.lives.get(event.request_id)
        # What is there, and not of the starving, of who saves, relied on or being read.
        spared = model.chunks.committed.keys() - kept_for.keys() - set(evicting.keys if evicting else ())
        read = {slot for _, job in model.jobs if job.is_load for slot in job.slots}
        relied_on = model.promises.relied_on()
        could_go = [k for k in spared if k not in relied_on and read.isdisjoint(model.chunks.committed[k])]
        if not could_go:
            return None
        detail = f"chunk {event.key.hex()} of starving {who!r} was evicted, {min(could_go).hex()} could have been"
        return [Violation(self.rule, moment.sequence, who, None, detail, (self._starving[who], event.cause))]


class StarvationGuard(Extension):
    """Keeps the chunks of starving requests before all others."""

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
    projections = (ProjectionSpec("starving", lambda _its: StarvingRequests(), of_requests=True),)
    rules: ClassVar[dict[str, Any]] = {StarvingKept.rule: StarvingKept}
    settings: ClassVar[dict[str, int]] = {"num_preemptions": 2}

    def kept(self, projections: Projections) -> Collection[bytes]:
        """All keys of starving requests."""
        starving = projections.starving.state.starving  # type: ignore[attr-defined]
        return frozenset(key for request_id in starving for key in projections.chunk_keys.of(request_id))
