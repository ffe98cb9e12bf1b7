"""An index of saved tails of the audit's own, made from events alone, and why a tail is not there.

It is kept apart from `projections/tails.py` on purpose: a mistake there must not hide itself.
"""

from __future__ import annotations

import attrs

from kvledger.lifecycle import events as e

_DROPPING = (
    e.RequestArrived,
    e.RequestReleased,
    e.PrefillAdvanced,
    e.PrefillCompleted,
    e.LoadFailed,
    e.RequestPreempted,
    e.SessionContinued,
    e.RequestFinished,
    e.RequestQuarantined,
)

TAIL_EVENTS: frozenset[type[e.Event]] = frozenset(
    {e.TailSaveIssued, e.SaveCompleted, e.SaveFailed, e.CacheReset, *_DROPPING}
)
"""What `SavedTails.fold` wants to see."""


@attrs.frozen
class IssuedTail:
    """Tokens from `first_token` to before `end_token`, being saved or saved."""

    job_id: int
    sequence: int
    first_token: int
    end_token: int
    slots: tuple[int, ...]
    is_saved: bool = False


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

    def fold(self, event: e.Event, sequence: int) -> None:
        """Take up one event; others than `TAIL_EVENTS` change nothing."""
        if isinstance(event, e.TailSaveIssued):
            end_token = event.first_token + event.num_tokens
            self._tails[event.request_id] = IssuedTail(
                event.job_id, sequence, event.first_token, end_token, event.slots
            )
        elif isinstance(event, e.SaveCompleted | e.SaveFailed):
            tail = self._tails.get(event.request_id)
            if tail is not None and tail.job_id == event.job_id:
                if isinstance(event, e.SaveFailed):
                    self._drop(event.request_id, event, sequence)
                else:
                    self._tails[event.request_id] = attrs.evolve(tail, is_saved=True)
        elif isinstance(event, e.CacheReset):
            for request_id in tuple(self._tails):
                self._drop(request_id, event, sequence)
        elif isinstance(event, _DROPPING):
            self._drop(event.request_id, event, sequence)

    def _drop(self, request_id: str, event: e.Event, sequence: int) -> None:
        tail = self._tails.pop(request_id, None)
        if isinstance(event, e.RequestArrived | e.RequestReleased):
            self._dropped.pop(request_id, None)
        elif tail is not None:
            self._dropped[request_id] = (tail, event.id, sequence)
