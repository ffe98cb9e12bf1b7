"""The saved tail of each life, and why a life has none."""

from __future__ import annotations

import attrs
import msgspec

from kvledger.lifecycle import events as e
from kvledger.lifecycle.events import NO_SLOT
from kvledger.lifecycle.marks import on
from kvledger.lifecycle.reader.lives import Lives
from kvledger.lifecycle.reader.moment import Moment
from kvledger.lifecycle.reader.records import IssuedTail, Life
from kvledger.lifecycle.reader.slots import Slots

_DECIDED_AWAY: tuple[type[e.RequestDecision], ...] = (e.PrefillAdvanced, e.PrefillCompleted, e.RequestQuarantined)
_TAKEN_AWAY: tuple[type[e.RequestEvent], ...] = (
    e.RequestPreempted,
    e.SessionContinued,
    e.RequestFinished,
    e.RequestArrived,
)


class StoredTails(msgspec.Struct, forbid_unknown_fields=True):
    """State of `Tails`, as plain values. Keys are ordinals of lives."""

    tails: dict[int, IssuedTail]
    dropped: dict[int, tuple[IssuedTail, str, int]]


class Tails:
    """Ordinal → the life's tail, at most one. Fold this before `Lives`, which forgets a life that is over.

    A saved tail holds its slots.
    """

    def __init__(self, lives: Lives, slots: Slots, moment: Moment, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._moment = moment
        self._lives = lives
        self._slots = slots
        self._tails: dict[int, IssuedTail] = {}
        self._dropped: dict[int, tuple[IssuedTail, str, int]] = {}
        """Ordinal → (last tail, id and sequence number of the event that dropped it), until the life is over."""

    def saved(self, life: Life | None) -> IssuedTail | None:
        """Return the life's tail if it is saved, so that the life may load it; None otherwise."""
        tail = None if life is None else self._tails.get(life.ordinal)
        return tail if tail is not None and tail.is_saved else None

    def of_slot(self, slot: int) -> int | None:
        """Return the ordinal of the life whose saved tail is in the slot; None if there is none."""
        return next((life for life, tail in self._tails.items() if tail.is_saved and slot in tail.slots), None)

    def why_none(self, life: Life | None) -> tuple[str, int]:
        """Return in words why the life has no tail to load, and the sequence number of an event that shows it, or 0."""
        ordinal = -1 if life is None else life.ordinal
        tail = self._tails.get(ordinal)
        if tail is not None:
            state = "is saved" if tail.is_saved else "is not saved yet"
            return f"the request's tail of tokens {tail.first_token} to {tail.end_token} {state}", tail.sequence
        if ordinal in self._dropped:
            tail, event_id, sequence = self._dropped[ordinal]
            return (
                f"the request's tail of tokens {tail.first_token} to {tail.end_token} was dropped by {event_id}",
                sequence,
            )
        return "the request has no tail", 0

    def stored(self) -> StoredTails:
        """Return the state."""
        return StoredTails(dict(self._tails), dict(self._dropped))

    def resume(self, stored: StoredTails) -> None:
        """Restore a stored state."""
        self._tails, self._dropped = dict(stored.tails), dict(stored.dropped)

    def lost(self) -> None:
        """Forget the tails, because events are missing."""
        self._tails.clear()
        self._dropped.clear()

    @on(e.TailSaveIssued)
    def _issued(self, event: e.TailSaveIssued) -> None:
        if self._lives.of(event.ordinal) is not None:
            end_token = event.first_token + min(event.num_tokens, self._chunk_size)
            self._tails[event.ordinal] = IssuedTail(
                event.job_id, self._moment.sequence, event.first_token, end_token, event.slots
            )

    @on(e.SaveCompleted)
    def _completed(self, event: e.SaveCompleted) -> None:
        tail = self._tails.get(event.ordinal)
        if tail is not None and tail.job_id == event.job_id:
            self._tails[event.ordinal] = attrs.evolve(tail, is_saved=True)
            self._slots.hold(tail.slots)

    @on(e.SaveFailed)
    def _save_failed(self, event: e.SaveFailed) -> None:
        tail = self._tails.get(event.ordinal)
        if tail is not None and tail.job_id == event.job_id:
            self._drop(event.ordinal, event, self._moment.sequence)

    @on(e.LoadIssued)
    def _load_issued(self, event: e.LoadIssued) -> None:
        tail = self._tails.get(event.ordinal)
        if tail is not None and tail.is_saved and not (set(tail.slots) - {NO_SLOT}).isdisjoint(event.slots):
            self._tails[event.ordinal] = attrs.evolve(tail, load_id=event.job_id)

    @on(e.LoadFailed)
    def _load_failed(self, event: e.LoadFailed) -> None:
        tail = self._tails.get(event.ordinal)
        if tail is not None and tail.load_id == event.job_id:
            self._drop(event.ordinal, event, self._moment.sequence)

    @on(e.CacheReset)
    def _reset(self, event: e.CacheReset) -> None:
        for ordinal in tuple(self._tails):
            self._drop(ordinal, event, self._moment.sequence)

    @on(*_DECIDED_AWAY)
    def _decided_away(self, event: e.RequestDecision) -> None:
        self._drop(event.ordinal, event, self._moment.sequence)

    @on(*_TAKEN_AWAY)
    def _taken_away(self, event: e.RequestEvent) -> None:
        life = self._lives.get(event.request_id)
        if life is not None:
            self._drop(life.ordinal, event, self._moment.sequence)
            if type(event) is e.RequestArrived:
                self._dropped.pop(life.ordinal, None)

    @on(e.RequestReleased)
    def _released(self, event: e.RequestReleased) -> None:
        self._drop(event.ordinal, event, self._moment.sequence)
        self._dropped.pop(event.ordinal, None)

    def _drop(self, ordinal: int, event: e.Event, sequence: int) -> None:
        tail = self._tails.pop(ordinal, None)
        if tail is not None:
            self._dropped[ordinal] = (tail, event.id, sequence)
            if tail.is_saved:
                self._slots.release(tail.slots)
