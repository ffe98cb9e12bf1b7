"""Which events of a log concern one request: enough for its accounts to be the same as over the whole log.

Two readings. The first (`learn`) takes up the request's own events; what it finds, keys and lives, decides in the
second (`concerns`) which events of others matter: those that saved, evicted or tainted the same chunks.
"""

from __future__ import annotations

from kvledger.lifecycle import events as e

_OF_SHARERS = (
    e.ChunkKeysObserved,
    e.SaveIssued,
    e.SaveCompleted,
    e.SaveFailed,
    e.SaveDeclined,
    e.SessionContinued,
    e.RequestArrived,
    e.RequestFinished,
    e.RequestReleased,
)


class Concerned:
    """Chooses events for one request id, through all its lives."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.keys: set[bytes] = set()
        self.ordinals: set[int] = set()
        self.job_ids: set[int] = set()
        self._sharers: set[str] = set()

    def learn(self, event: e.Event) -> bool:
        """First reading: take up an event if it is the request's own; returns whether it is."""
        if getattr(event, "request_id", None) != self.request_id:
            return False
        if isinstance(event, e.ChunkKeysObserved):
            self.keys.update(event.keys)
        elif isinstance(event, e.RequestArrived):
            self.ordinals.add(event.ordinal)
        elif isinstance(event, e.LoadIssued | e.SaveIssued | e.TailSaveIssued):
            self.job_ids.add(event.job_id)
        return True

    def concerns(self, event: e.Event) -> bool:
        """Second reading, in order: whether the event has a part in the request's story."""
        if isinstance(event, e.StepScheduled):
            return self._is_in(event)
        if isinstance(event, e.ChunkEvicted | e.ChunkTainted):
            return event.key in self.keys
        if isinstance(event, e.TransferReported):
            return event.job_id in self.job_ids
        if isinstance(event, e.ChunkKeysObserved) and not self.keys.isdisjoint(event.keys):
            self._sharers.add(event.request_id)
        request_id = getattr(event, "request_id", None)
        of_sharer = request_id in self._sharers and isinstance(event, _OF_SHARERS)
        of_all = isinstance(event, e.CacheReset | e.LogNote) or (isinstance(event, e.HookFailed) and not request_id)
        return request_id == self.request_id or of_sharer or of_all

    def _is_in(self, step: e.StepScheduled) -> bool:
        ordinals = self.ordinals
        return (
            any(entry[0] in ordinals for entry in step.advanced)
            or any(ordinal in ordinals for ordinal in step.paused)
            or any(entry[0] in ordinals for entry in step.extended)
            or any(entry[0] in ordinals for entry in step.settled)
        )
