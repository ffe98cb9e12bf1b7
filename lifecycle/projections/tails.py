"""The part-filled last chunk of each preempted request: a page image that only this life of it may load.

It has no chunk key, because it is no chunk: it ends where the request's written tokens ended. It is dropped when the
request runs again, and with everything that makes its tokens doubtful.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.projections.host_slots import HostSlots
from kvledger.lifecycle.projections.tracker import RequestTracker


@attrs.define
class Tail:
    """Tokens from `first_token` to before `end_token`; one slot for each block that they touch."""

    job_id: int
    first_token: int
    end_token: int
    slots: tuple[int, ...]
    is_saved: bool = False


class Tails:
    """Life of a request -> its tail. To be folded before the chunk index, whose jobs own the slots until then."""

    def __init__(self, tracker: RequestTracker, slots: HostSlots) -> None:
        self._tracker = tracker
        self._slots = slots
        self._tails: dict[int, Tail] = {}

    def __len__(self) -> int:
        return len(self._tails)

    def saved(self, ordinal: int) -> Tail | None:
        """The tail that can be loaded, if there is one."""
        tail = self._tails.get(ordinal)
        return tail if tail is not None and tail.is_saved else None

    def of(self, ordinal: int) -> Tail | None:
        """The tail, saved or still being saved."""
        return self._tails.get(ordinal)

    def folds(self) -> Mapping[type[e.Event], Callable[..., None]]:
        """Event class -> fold."""
        return {
            e.TailSaveIssued: self._issued,
            e.SaveCompleted: self._save_completed,
            e.SaveFailed: self._save_failed,
            e.PrefillAdvanced: self._drop,
            e.PrefillCompleted: self._drop,
            e.LoadFailed: self._drop,
            e.RequestPreempted: self._drop,
            e.SessionContinued: self._drop,
            e.RequestFinished: self._drop,
            e.RequestQuarantined: self._drop,
            e.RequestArrived: self._drop,
            e.RequestReleased: self._drop,
            e.CacheReset: self._reset,
        }

    def snapshot(self) -> object:
        """Plain values, equal for equal states."""
        return {
            record.request_id: attrs.astuple(self._tails[record.ordinal])
            for record in self._tracker
            if record.ordinal in self._tails
        }

    def _issued(self, event: e.TailSaveIssued, _sequence: int) -> None:
        record = self._tracker.get(event.request_id)
        if record is not None:
            end_token = event.first_token + event.num_tokens
            self._tails[record.ordinal] = Tail(event.job_id, event.first_token, end_token, event.slots)

    def _save_completed(self, event: e.SaveCompleted, _sequence: int) -> None:
        if not self._tails:
            return
        record = self._tracker.get(event.request_id)
        tail = None if record is None else self._tails.get(record.ordinal)
        if tail is not None and tail.job_id == event.job_id:
            tail.is_saved = True
            self._slots.acquire(tail.slots)  # the job gives its reference back right after

    def _save_failed(self, event: e.SaveFailed, sequence: int) -> None:
        record = self._tracker.get(event.request_id)
        tail = None if record is None else self._tails.get(record.ordinal)
        if tail is not None and tail.job_id == event.job_id:
            self._drop(event, sequence)

    def _drop(self, event: e.RequestEvent, _sequence: int) -> None:
        if not self._tails:
            return
        record = self._tracker.get(event.request_id)
        if record is not None:
            self._forget(record.ordinal)

    def _forget(self, ordinal: int) -> None:
        tail = self._tails.pop(ordinal, None)
        if tail is not None and tail.is_saved:
            self._slots.release(tail.slots)

    def _reset(self, _event: e.CacheReset, _sequence: int) -> None:
        for ordinal in tuple(self._tails):
            self._forget(ordinal)
