"""What happened to a request, as numbers of events: what a story is told along, beside lookups and steps."""

from __future__ import annotations

from kvledger.lifecycle import events as e
from kvledger.lifecycle.reasons.lives import Lives
from kvledger.lifecycle.reasons.story import Story

_OF_A_REQUEST = (
    e.RequestArrived,
    e.RequestPreempted,
    e.LoadFailed,
    e.SaveFailed,
    e.SaveDeclined,
    e.TokensRolledBack,
    e.SessionContinued,
    e.RequestQuarantined,
    e.InvariantViolated,
    e.RequestFinished,
)


class Moments:
    """Adds to the stories of the lives that are kept."""

    def __init__(self, lives: Lives) -> None:
        self._lives = lives
        self._preempted: list[Story] = []

    def take(self, sequence: int, event: e.Event) -> None:
        """Take up an event, after the accounts have."""
        if isinstance(event, e.StepScheduled):
            # The step for which blocks were taken is recorded right behind the preemption.
            for story in self._preempted:
                story.keep(story.moments, sequence)
            self._preempted.clear()
        elif isinstance(event, _OF_A_REQUEST):
            self._note(event.request_id, sequence, event)
        elif isinstance(event, e.CacheReset) or (isinstance(event, e.HookFailed) and not event.request_id):
            for life in self._lives:
                if life.story is not None:
                    life.story.keep(life.story.moments, sequence)
        elif isinstance(event, e.HookFailed):
            self._note(event.request_id, sequence, event)

    def _note(self, request_id: str, sequence: int, event: e.Event) -> None:
        life = self._lives.get(request_id)
        if life is not None and life.story is not None:
            life.story.keep(life.story.moments, sequence)
            if isinstance(event, e.RequestPreempted):
                self._preempted.append(life.story)
