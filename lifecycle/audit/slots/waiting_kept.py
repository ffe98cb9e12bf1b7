"""WAITING_KEPT: what a preempted request will come back for is not evicted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import Check, Moment


class WaitingKept:
    """From its preemption until it has blocks again or ends, no whole chunk that a request had computed is evicted.

    Verifies: this for every eviction, where the configuration keeps for the preempted (decision 0009): a save that
    would need the room is declined.
    Does not verify: what the request was promised already (HIT_PINNED); in which order the others are evicted; chunks
    that were tainted or are from before a reset.
    """

    rule: ClassVar[str] = "WAITING_KEPT"

    _model: Model

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._model = model
        return [(e.ChunkEvicted, self._evicted)]

    def _evicted(self, event: e.ChunkEvicted, moment: Moment) -> list[Violation] | None:
        found = None
        for request_id, promise in self._model.promises.waited_for(event.key):
            promised = self._model.promises.to(request_id)
            if promised is not None and event.key in promised.keys:
                continue
            detail = f"chunk {event.key.hex()} was evicted, though {request_id!r} was preempted and waits for it"
            evidence = (promise.sequence, event.cause)
            broken = violation(self.rule, moment, detail, *evidence, request_id=request_id)
            found = [*(found or ()), broken]
        return found
