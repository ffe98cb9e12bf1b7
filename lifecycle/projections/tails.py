"""The part-filled last chunk of each preempted request: a page image that only this life of it may load.

It has no chunk key, because it is no chunk: it ends where the request's written tokens ended. It is dropped when the
request runs again, and with everything that makes its tokens doubtful.
"""

from __future__ import annotations

import attrs
import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.projections import Projection
from kvledger.lifecycle.projections.host_slots import HostSlots
from kvledger.lifecycle.projections.tracker import RequestTracker
from kvledger.lifecycle.ranges import JobId, LifeOrdinal, NumTokens, Slot, SumOfTokens


@attrs.define
class Tail:
    """Tokens from `first_token` to before `end_token`; one slot for each block that they touch.

    They are at most one chunk, whatever a log says.
    """

    job_id: JobId
    first_token: NumTokens
    end_token: SumOfTokens
    slots: tuple[Slot, ...]
    is_saved: bool = False
    load_id: JobId = 0
    """The last load that reads it; 0: none."""


class State(msgspec.Struct, forbid_unknown_fields=True):
    """By the ordinal of a life."""

    tails: dict[LifeOrdinal, Tail] = {}


class Tails(Projection):
    """Life of a request -> its tail. To be folded before the chunk index, whose jobs own the slots until then.

    Settlements concern the job that saves it or reads it: both belong to other generations than the one that waits for
    it. Everything else concerns the life.
    """

    def __init__(self, tracker: RequestTracker, slots: HostSlots, chunk_size: int) -> None:
        self._tracker = tracker
        self._slots = slots
        self._chunk_size = chunk_size
        self.state = State()

    def check(self) -> None:
        """A tail is at most one chunk."""
        if any(tail.end_token - tail.first_token > self._chunk_size for tail in self.state.tails.values()):
            raise ValueError("a tail is longer than a chunk")

    def __len__(self) -> int:
        return len(self.state.tails)

    def saved(self, ordinal: int) -> Tail | None:
        """The tail that can be loaded, if there is one."""
        tail = self.state.tails.get(ordinal)
        return tail if tail is not None and tail.is_saved else None

    def of(self, ordinal: int) -> Tail | None:
        """The tail, saved or still being saved."""
        return self.state.tails.get(ordinal)

    @on(e.TailSaveIssued)
    def _issued(self, event: e.TailSaveIssued, _sequence: int) -> None:
        if self._tracker.of(event.ordinal) is not None:
            end_token = event.first_token + min(event.num_tokens, self._chunk_size)
            self.state.tails[event.ordinal] = Tail(event.job_id, event.first_token, end_token, event.slots)

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued, _sequence: int) -> None:
        tail = self.saved(event.ordinal)
        if tail is not None and not (set(tail.slots) - {NO_SLOT}).isdisjoint(event.slots):
            tail.load_id = event.job_id

    @on(e.SaveCompleted)
    def _save_completed(self, event: e.SaveCompleted, _sequence: int) -> None:
        tail = self.state.tails.get(event.ordinal)
        if tail is not None and tail.job_id == event.job_id:
            tail.is_saved = True
            self._slots.acquire(tail.slots)  # the job gives its reference back right after

    @on(e.SaveFailed)
    def _save_failed(self, event: e.SaveFailed, _sequence: int) -> None:
        tail = self.state.tails.get(event.ordinal)
        if tail is not None and tail.job_id == event.job_id:
            self._forget(event.ordinal)

    @on(e.LoadFailed)
    def _load_failed(self, event: e.LoadFailed, _sequence: int) -> None:
        tail = self.state.tails.get(event.ordinal)
        if tail is not None and tail.load_id == event.job_id:
            self._forget(event.ordinal)

    @on(e.PrefillAdvanced, e.PrefillCompleted, e.RequestQuarantined, e.RequestReleased)
    def _dropped(self, event: e.RequestDecision, _sequence: int) -> None:
        self._forget(event.ordinal)

    @on(e.RequestPreempted, e.SessionContinued, e.RequestFinished, e.RequestArrived)
    def _drop(self, event: e.RequestEvent, _sequence: int) -> None:
        if not self.state.tails:
            return
        record = self._tracker.get(event.request_id)
        if record is not None:
            self._forget(record.ordinal)

    def _forget(self, ordinal: int) -> None:
        tail = self.state.tails.pop(ordinal, None)
        if tail is not None and tail.is_saved:
            self._slots.release(tail.slots)

    @on(e.CacheReset)
    def _reset(self, _event: e.CacheReset, _sequence: int) -> None:
        for ordinal in tuple(self.state.tails):
            self._forget(ordinal)
