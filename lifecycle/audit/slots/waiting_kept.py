"""WAITING_KEPT: what a preempted request will come back for is not evicted."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Checker
from kvledger.lifecycle.audit.model.moment import on


class WaitingKept(Checker):
    """From its preemption until it has blocks again or ends, no whole chunk that a request had computed is evicted.

    Verifies: this for every eviction, where the configuration keeps for the preempted (decision 0009): a save that
    would need the room is declined.
    Does not verify: what the request was promised already (HIT_PINNED); in which order the others are evicted; chunks
    that were tainted or are from before a reset.
    """

    rule = "WAITING_KEPT"

    @on(e.ChunkEvicted)
    def _evicted(self, event: e.ChunkEvicted) -> None:
        for request_id, promise in self.promises.waited_for(event.key):
            promised = self.promises.to(request_id)
            if promised is None or event.key not in promised.keys:
                detail = f"chunk {event.key.hex()} was evicted, though {request_id!r} was preempted and waits for it"
                self.broken(detail, promise.sequence, event.cause, request_id=request_id)
