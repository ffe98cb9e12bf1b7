"""An index of saved tails of the audit's own, made from events alone, and why a tail is not there.

It is kept apart from `projections/tails.py` on purpose: a mistake there must not hide itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.forgotten import LIFE, Forgotten
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.projections.host_slots import NO_SLOT
from kvledger.lifecycle.replay import Check, ReplayedEvent

_DROPPING: tuple[type[e.RequestEvent], ...] = (
    e.PrefillAdvanced,
    e.PrefillCompleted,
    e.RequestPreempted,
    e.SessionContinued,
    e.RequestFinished,
    e.RequestQuarantined,
)


@attrs.frozen
class IssuedTail:
    """Tokens from `first_token` to before `end_token`, being saved or saved."""

    job_id: int
    sequence: int
    first_token: int
    end_token: int
    slots: tuple[int, ...]
    is_saved: bool = False
    load_id: int = 0
    """The last load that reads it; 0: none."""


class SavedTails:
    """Request id -> the tail of its present life. At most one, for a preemption replaces what was there."""

    def __init__(self) -> None:
        self._tails: dict[str, IssuedTail] = {}
        self._dropped: dict[str, tuple[IssuedTail, str, int]] = {}
        """Request id -> (its last tail, id of the event that dropped it, sequence), until its life ends."""

    def saved(self, request_id: str) -> IssuedTail | None:
        """The tail that the request may load."""
        tail = self._tails.get(request_id)
        return tail if tail is not None and tail.is_saved else None

    def why_none(self, request_id: str) -> tuple[str, int]:
        """Why the request has no tail to load, in words, and the sequence of the event that shows it (0: none)."""
        tail = self._tails.get(request_id)
        if tail is not None:
            state = "is saved" if tail.is_saved else "is not saved yet"
            return f"its tail of tokens {tail.first_token} to {tail.end_token} {state}", tail.sequence
        if request_id in self._dropped:
            tail, event_id, sequence = self._dropped[request_id]
            return f"its tail of tokens {tail.first_token} to {tail.end_token} was dropped by {event_id}", sequence
        return "it has no tail", 0

    def begin(self, projections: Projections) -> None:
        """Take over the tails of the requests that are known."""
        for record in projections.tracker:
            tail = projections.tails.of(record.ordinal)
            if tail is not None:
                self._tails[record.request_id] = IssuedTail(
                    tail.job_id, 0, tail.first_token, tail.end_token, tail.slots, tail.is_saved, tail.load_id
                )

    def folds(self, forgotten: Forgotten) -> Iterable[tuple[type[e.Event], Check]]:
        """(event class, fold), to be done as checks are; they never find anything."""
        forgotten.at(LIFE, self._tails, self._dropped)
        return [
            (e.TailSaveIssued, self._issued),
            (e.SaveCompleted, self._completed),
            (e.SaveFailed, self._failed),
            (e.LoadIssued, self._load_issued),
            (e.LoadFailed, self._load_failed),
            (e.CacheReset, self._reset),
            *((event_class, self._dropping) for event_class in _DROPPING),
        ]

    def _issued(self, event: e.TailSaveIssued, step: ReplayedEvent, _projections: Projections) -> None:
        end_token = event.first_token + event.num_tokens
        self._tails[event.request_id] = IssuedTail(
            event.job_id, step.sequence, event.first_token, end_token, event.slots
        )

    def _completed(self, event: e.SaveCompleted, _step: ReplayedEvent, _projections: Projections) -> None:
        if self._tails:
            tail = self._tails.get(event.request_id)
            if tail is not None and tail.job_id == event.job_id:
                self._tails[event.request_id] = attrs.evolve(tail, is_saved=True)

    def _failed(self, event: e.SaveFailed, step: ReplayedEvent, _projections: Projections) -> None:
        tail = self._tails.get(event.request_id)
        if tail is not None and tail.job_id == event.job_id:
            self._drop(event.request_id, event, step.sequence)

    def _load_issued(self, event: e.LoadIssued, _step: ReplayedEvent, _projections: Projections) -> None:
        tail = self.saved(event.request_id)
        if tail is not None and not (set(tail.slots) - {NO_SLOT}).isdisjoint(event.slots):
            self._tails[event.request_id] = attrs.evolve(tail, load_id=event.job_id)

    def _load_failed(self, event: e.LoadFailed, step: ReplayedEvent, _projections: Projections) -> None:
        tail = self._tails.get(event.request_id)
        if tail is not None and tail.load_id == event.job_id:
            self._drop(event.request_id, event, step.sequence)

    def _reset(self, event: e.CacheReset, step: ReplayedEvent, _projections: Projections) -> None:
        for request_id in tuple(self._tails):
            self._drop(request_id, event, step.sequence)

    def _dropping(self, event: e.RequestEvent, step: ReplayedEvent, _projections: Projections) -> None:
        if self._tails:
            self._drop(event.request_id, event, step.sequence)

    def _drop(self, request_id: str, event: e.Event, sequence: int) -> None:
        tail = self._tails.pop(request_id, None)
        if tail is not None:
            self._dropped[request_id] = (tail, event.id, sequence)
