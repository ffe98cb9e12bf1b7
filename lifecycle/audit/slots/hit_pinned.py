"""HIT_PINNED: what a lookup promised is there until the scheduler has taken it up."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model.moment import on


class HitPinned(Checker):
    """No chunk that the pending answer to a request promised is evicted.

    Verifies: this for every eviction, with promises folded from lookups, allocations and ends.
    Does not verify: taints and resets, which take chunks away from whoever relies on them by design.
    """

    rule = "HIT_PINNED"

    @on(e.ChunkEvicted)
    def _evicted(self, event: e.ChunkEvicted) -> None:
        for request_id, promise in self.promises.promised(event.key):
            detail = f"chunk {event.key.hex()} was evicted, though the pending answer to {request_id!r} promised it"
            self.broken(detail, promise.sequence, event.cause, request_id=request_id)
