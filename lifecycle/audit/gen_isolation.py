"""GEN_ISOLATION: what belongs to one generation of a request does not reach another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.jobs import JobsInFlight
from kvledger.lifecycle.audit.model.lives import Life
from kvledger.lifecycle.audit.model.moment import Check, Moment


class GenIsolation:
    """Jobs are known by their id, and what is decided names the life that it concerns.

    Verifies: a settled job names the life (request, ordinal, generation) it was issued for; what is decided names the
    present one, or the generation before for a save of blocks that were just lost, as a tail's always are.
    Does not verify: that an event of another generation leaves the request in its state, which the reference machines
    show that every audit walks along; that the bytes went to the right generation's blocks.
    """

    rule: ClassVar[str] = "GEN_ISOLATION"

    _jobs: JobsInFlight

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._jobs = model.jobs
        return [
            (e.LoadIssued, self._issued),
            (e.SaveIssued, self._issued),
            (e.TailSaveIssued, self._tail_issued),
            (e.LookupAnswered, self._answered),
            (e.LoadCompleted, self._settled),
            (e.LoadFailed, self._settled),
            (e.SaveCompleted, self._settled),
            (e.SaveFailed, self._settled),
        ]

    def _answered(self, event: e.LookupAnswered, moment: Moment) -> Iterator[Violation] | None:
        if moment.life is None or _life(event) == moment.life.name:
            return None
        return self._check_decided(event, moment.life, moment)

    def _issued(self, event: e.LoadIssued | e.SaveIssued, moment: Moment) -> Iterator[Violation] | None:
        if moment.life is None or _life(event) == moment.life.name:
            return None
        return self._check_decided(event, moment.life, moment)

    def _tail_issued(self, event: e.TailSaveIssued, moment: Moment) -> Iterator[Violation] | None:
        return None if moment.life is None else self._check_decided(event, moment.life, moment)

    def _check_decided(
        self, event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued | e.LookupAnswered, life: Life, moment: Moment
    ) -> Iterator[Violation]:
        # A tail is always saved from blocks that were just lost, which are those of the generation before.
        allowed = {life.generation - 1} if isinstance(event, e.TailSaveIssued) else {life.generation}
        if isinstance(event, e.SaveIssued) and event.before_forward:
            allowed.add(life.generation - 1)
        if event.ordinal != life.ordinal or event.generation not in allowed:
            detail = f"{event.id} names {_words(_life(event))}, the request is in {_words(life.name)}"
            yield violation(self.rule, moment, detail, event.cause)

    def _settled(
        self, event: e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed, moment: Moment
    ) -> list[Violation] | None:
        job = self._jobs.current
        if job is None or _life(event) == job.life:
            return None
        detail = (
            f"{event.id} for job {job.job_id} names {_words(_life(event))}, the job was issued for {_words(job.life)}"
        )
        return [violation(self.rule, moment, detail, job.sequence, event.cause)]


def _life(event: e.RequestDecision) -> tuple[str, int, int]:
    return event.request_id, event.ordinal, event.generation


def _words(life: tuple[str, int, int]) -> str:
    request_id, ordinal, generation = life
    return f"generation {generation} of life {ordinal} of {request_id!r}"
