"""The saved tail of each life, and why a tail is not there. The audit's own; see `lives.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.model.lives import Life, Lives
from kvledger.lifecycle.audit.model.moment import Check, Moment
from kvledger.lifecycle.audit.model.slots import Slots
from kvledger.lifecycle.windows import NO_SLOT

if TYPE_CHECKING:
    from kvledger.lifecycle.audit.model.start import Start

_DECIDED_AWAY: tuple[type[e.RequestDecision], ...] = (e.PrefillAdvanced, e.PrefillCompleted, e.RequestQuarantined)
_TAKEN_AWAY: tuple[type[e.RequestEvent], ...] = (
    e.RequestPreempted,
    e.SessionContinued,
    e.RequestFinished,
    e.RequestArrived,
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


class Tails:
    """Ordinal -> the tail of that life: at most one. To be folded before the lives, which are forgotten at their end.

    A saved tail needs its slots.
    """

    def __init__(self, lives: Lives, slots: Slots) -> None:
        self._lives = lives
        self._slots = slots
        self._tails: dict[int, IssuedTail] = {}
        self._dropped: dict[int, tuple[IssuedTail, str, int]] = {}
        """Ordinal -> (its last tail, id of the event that dropped it, sequence), until the life is over."""

    def __len__(self) -> int:
        return len(self._tails)

    def of(self, life: Life) -> IssuedTail | None:
        """Its tail, saved or still being saved."""
        return self._tails.get(life.ordinal) if self._tails else None

    def saved(self, life: Life | None) -> IssuedTail | None:
        """The tail that it may load."""
        tail = None if life is None or not self._tails else self._tails.get(life.ordinal)
        return tail if tail is not None and tail.is_saved else None

    def of_slot(self, slot: int) -> int | None:
        """The ordinal of the life whose saved tail lies in the slot."""
        return next((life for life, tail in self._tails.items() if tail.is_saved and slot in tail.slots), None)

    def why_none(self, life: Life | None) -> tuple[str, int]:
        """Why it has no tail to load, in words, and the sequence of the event that shows it (0: none)."""
        ordinal = -1 if life is None else life.ordinal
        tail = self._tails.get(ordinal)
        if tail is not None:
            state = "is saved" if tail.is_saved else "is not saved yet"
            return f"its tail of tokens {tail.first_token} to {tail.end_token} {state}", tail.sequence
        if ordinal in self._dropped:
            tail, event_id, sequence = self._dropped[ordinal]
            return f"its tail of tokens {tail.first_token} to {tail.end_token} was dropped by {event_id}", sequence
        return "it has no tail", 0

    def begin(self, start: Start) -> None:
        """Take over the tails where an audit starts in the middle of a log."""
        self._tails.update(start.tails)
        for tail in start.tails.values():
            if tail.is_saved:
                self._slots.hold(tail.slots)

    def folds(self) -> Iterable[tuple[type[e.Event], Check]]:
        """(event class, fold), to be done as checks are; they never find anything."""
        return [
            (e.TailSaveIssued, self._issued),
            (e.SaveCompleted, self._completed),
            (e.SaveFailed, self._save_failed),
            (e.LoadIssued, self._load_issued),
            (e.LoadFailed, self._load_failed),
            (e.CacheReset, self._reset),
            *((event_class, self._decided_away) for event_class in _DECIDED_AWAY),
            *((event_class, self._taken_away) for event_class in _TAKEN_AWAY),
            (e.RequestReleased, self._released),
        ]

    def _issued(self, event: e.TailSaveIssued, moment: Moment) -> None:
        if self._lives.of(event.ordinal) is not None:
            end_token = event.first_token + event.num_tokens
            self._tails[event.ordinal] = IssuedTail(
                event.job_id, moment.sequence, event.first_token, end_token, event.slots
            )

    def _completed(self, event: e.SaveCompleted, _moment: Moment) -> None:
        if self._tails:
            tail = self._tails.get(event.ordinal)
            if tail is not None and tail.job_id == event.job_id:
                self._tails[event.ordinal] = attrs.evolve(tail, is_saved=True)
                self._slots.hold(tail.slots)

    def _save_failed(self, event: e.SaveFailed, moment: Moment) -> None:
        tail = self._tails.get(event.ordinal)
        if tail is not None and tail.job_id == event.job_id:
            self._drop(event.ordinal, event, moment.sequence)

    def _load_issued(self, event: e.LoadIssued, _moment: Moment) -> None:
        tail = self._tails.get(event.ordinal)
        if tail is not None and tail.is_saved and not (set(tail.slots) - {NO_SLOT}).isdisjoint(event.slots):
            self._tails[event.ordinal] = attrs.evolve(tail, load_id=event.job_id)

    def _load_failed(self, event: e.LoadFailed, moment: Moment) -> None:
        tail = self._tails.get(event.ordinal)
        if tail is not None and tail.load_id == event.job_id:
            self._drop(event.ordinal, event, moment.sequence)

    def _reset(self, event: e.CacheReset, moment: Moment) -> None:
        for ordinal in tuple(self._tails):
            self._drop(ordinal, event, moment.sequence)

    def _decided_away(self, event: e.RequestDecision, moment: Moment) -> None:
        if self._tails:
            self._drop(event.ordinal, event, moment.sequence)

    def _taken_away(self, event: e.RequestEvent, moment: Moment) -> None:
        life = self._lives.get(event.request_id)
        if life is not None:
            self._drop(life.ordinal, event, moment.sequence)
            if type(event) is e.RequestArrived:
                self._dropped.pop(life.ordinal, None)

    def _released(self, event: e.RequestReleased, moment: Moment) -> None:
        self._drop(event.ordinal, event, moment.sequence)
        self._dropped.pop(event.ordinal, None)

    def _drop(self, ordinal: int, event: e.Event, sequence: int) -> None:
        tail = self._tails.pop(ordinal, None)
        if tail is not None:
            self._dropped[ordinal] = (tail, event.id, sequence)
            if tail.is_saved:
                self._slots.release(tail.slots)
