"""An observation with everything that was decided upon it: what a log is made of, and what a reader is shown as one."""

from __future__ import annotations

from abc import abstractmethod

import attrs

from kvledger.lifecycle import SequencedEvent
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Life, Model, Visitor, Visits


@attrs.frozen
class Observation:
    """An observed event, and the decisions upon it."""

    sequence: int
    event: e.Event
    decisions: list[SequencedEvent] = attrs.field(factory=list)

    @property
    def last_sequence(self) -> int:
        """Of its last decision."""
        return self.decisions[-1][0] if self.decisions else self.sequence


class ObservationVisitor(Visitor[Model]):
    """Is shown each observation of the log once everything is decided. Decisions without their observation are not."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._observation: Observation | None = None
        self._over: dict[str, Life] = {}
        """Request id → its life, if that ended at this observation."""

    @abstractmethod
    def observed(self, observation: Observation) -> None:
        """Look at an observation. The model contains it, and what was decided upon it."""

    def visits(self) -> Visits:
        """Every event."""
        return [(event_class, self._gather) for event_class in e.STANDARD_EVENTS.values()]

    def ended(self, life: Life) -> None:
        """Its last observation is still to be shown."""
        self._over[life.request_id] = life

    def decided(self) -> None:
        """Show the observation."""
        observation, self._observation = self._observation, None
        if observation is not None:
            self.observed(observation)
        self._over.clear()

    def life_of(self, request_id: str) -> Life | None:
        """The present life of the id, or the one that ended at this observation."""
        return self.model.lives.get(request_id) or self._over.get(request_id)

    def paths(self, request_id: str) -> tuple[str | None, str | None]:
        """State and sub-state of a request before the observation and after it; None where it had none or is over."""
        life, lives = self.life_of(request_id), self.model.lives
        if life is None:
            return None, None
        path_after = None if lives.get(request_id) is None else life.path
        return lives.path_before_observation(life) or None, path_after or None

    def _gather(self, event: e.Event) -> None:
        if not event.is_decision:
            self._observation = Observation(self.moment.sequence, event)
        elif self._observation is not None:
            self._observation.decisions.append((self.moment.sequence, event))
