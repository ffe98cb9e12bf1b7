"""HIT_PINNED: what a lookup promised is there until the scheduler has taken it up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.moment import Check, Moment


class HitPinned:
    """No chunk that the pending answer to a request promised is evicted.

    Verifies: this for every eviction, with promises folded from lookups, allocations and ends.
    Does not verify: taints and resets, which take chunks away from whoever relies on them by design.
    """

    rule: ClassVar[str] = "HIT_PINNED"

    _model: Model

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._model = model
        return [(e.ChunkEvicted, self._evicted)]

    def _evicted(self, event: e.ChunkEvicted, moment: Moment) -> list[Violation] | None:
        found = None
        for request_id, promise in self._model.promises.promised(event.key):
            detail = f"chunk {event.key.hex()} was evicted, though the pending answer to {request_id!r} promised it"
            evidence = (promise.sequence, event.cause)
            broken = violation(self.rule, moment, detail, *evidence, request_id=request_id)
            found = [*(found or ()), broken]
        return found
