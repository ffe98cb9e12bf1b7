"""An observation with all decisions that it caused. Commands show a log in these units."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import attrs

from kvledger.lifecycle import SequencedEvent
from kvledger.lifecycle import events as e
from kvledger.lifecycle.reader import Life, Model, Visitor, Visits


@attrs.frozen
class Observation:
    """An observation, and the decisions that it caused."""

    sequence: int
    event: e.Event
    decisions: list[SequencedEvent] = attrs.field(factory=list)

    @property
    def last_sequence(self) -> int:
        """Sequence number of the last decision, or of the observation if it caused no decision."""
        return self.decisions[-1][0] if self.decisions else self.sequence


class ObservationVisitor(Visitor[Model]):
    """A visitor whose method `observed` gets each observation together with all of its decisions.

    Decisions without an observation are skipped.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._observation: Observation | None = None
        self._over: dict[str, Life] = {}
        """Request id → life that ended at this observation."""

    @abstractmethod
    def observed(self, observation: Observation) -> None:
        """Handle an observation. The model has already folded the observation and its decisions."""

    def visits(self) -> Visits:
        """Return which method to call for which events: `_gather` for all."""
        return [(event_class, self._gather) for event_class in e.STANDARD_EVENTS.values()]

    def ended(self, life: Life) -> None:
        """Keep the life until `observed` has handled this observation."""
        self._over[life.request_id] = life

    def decided(self) -> None:
        """Pass the complete observation to `observed`."""
        observation, self._observation = self._observation, None
        if observation is not None:
            self.observed(observation)
        self._over.clear()

    def life_of(self, request_id: str) -> Life | None:
        """Return the present life of a request id, or the life that ended at this observation."""
        return self.model.lives.get(request_id) or self._over.get(request_id)

    def present_ids(self) -> Iterator[str]:
        """Yield the request ids for which `life_of` has a life."""
        yield from (life.request_id for life in self.model.lives)
        yield from self._over

    def paths(self, request_id: str) -> tuple[str | None, str | None]:
        """Return a request's states, with sub-states, before and after the observation; None if it had no life then."""
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
