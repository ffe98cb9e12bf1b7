"""What happened to a request, as numbers of events: what a history shows besides lookups and steps."""

from __future__ import annotations

from collections.abc import Callable

from kvledger.adapters.tools.reasons.memory import Memory
from kvledger.lifecycle import events as e

_OF_A_REQUEST = (
    e.RequestArrived,
    e.RequestPreempted,
    e.LoadCompleted,
    e.LoadFailed,
    e.SaveFailed,
    e.SaveDeclined,
    e.TokensRolledBack,
    e.SessionContinued,
    e.RequestQuarantined,
    e.InvariantViolated,
    e.RequestFinished,
    e.ExtensionObserved,
    e.ExtensionDecided,
)


class Moments:
    """Adds to the histories of the lives that are kept."""

    def __init__(self, memory: Memory) -> None:
        self._lives = memory.lives
        self._preempted = memory.state.preempted
        self._notes: dict[type[e.Event], Callable[..., None]] = {
            **dict.fromkeys(_OF_A_REQUEST, self._of_a_request),
            e.StepScheduled: self._step,
            **dict.fromkeys((e.CacheReset, e.PrefixCacheReset, e.ExtensionStopped), self._of_all),
            e.HookFailed: self._hook_failed,
            **dict.fromkeys((e.LookupAnswered, e.LookupDeferred), self._answered),
        }

    def take(self, sequence: int, event: e.Event) -> None:
        """Take up an event, after the accounts have."""
        note = self._notes.get(type(event))
        if note is not None:
            note(event, sequence)

    def _step(self, _event: e.StepScheduled, sequence: int) -> None:
        # The step for which blocks were taken is recorded right behind the preemption.
        for life in map(self._lives.get, self._preempted):
            if life is not None and life.history is not None and life.preempted:  # else another one has its id by now
                life.history.keep(life.history.moments, sequence)
        self._preempted.clear()

    def _of_all(self, _event: e.Event, sequence: int) -> None:
        for life in self._lives:
            if life.history is not None:
                life.history.keep(life.history.moments, sequence)

    def _hook_failed(self, event: e.HookFailed, sequence: int) -> None:
        if event.request_id:
            self._of_a_request(event, sequence)
        else:
            self._of_all(event, sequence)

    def _answered(self, event: e.LookupAnswered | e.LookupDeferred, _sequence: int) -> None:
        # An extension that answers does so in an event of its own; a lookup shows it, and folds what repeats.
        life = self._lives.get(event.request_id)
        if life is not None and life.history is not None and life.history.moments[-1:] == [event.cause]:
            life.history.moments.pop()

    def _of_a_request(self, event: e.RequestEvent | e.HookFailed | e.InvariantViolated, sequence: int) -> None:
        life = self._lives.get(event.request_id)
        if life is not None and life.history is not None:
            life.history.keep(life.history.moments, sequence)
            if isinstance(event, e.RequestPreempted):
                self._preempted.append(event.request_id)
