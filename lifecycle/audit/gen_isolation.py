"""GEN_ISOLATION: what belongs to one generation of a request does not reach another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.jobs import InFlight, JobsInFlight
from kvledger.lifecycle.projections import Projections
from kvledger.lifecycle.replay import Check, ReplayedEvent


class GenIsolation:
    """Jobs are known by their id, and an event of an earlier generation or life moves nothing.

    Verifies: a settled job names the life (request, ordinal, generation) it was issued for; what is decided names the
    present one, or the generation before for a save of blocks that were just lost, as a tail's always are; an
    event of another generation, or of an earlier request with the same id, leaves the request in its state.
    Does not verify: that the bytes went to the right generation's blocks.
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

    def _answered(
        self, event: e.LookupAnswered, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation] | None:
        if step.record is None or _life(event) == step.record.life:
            return None
        return self._check_decided(event, step, projections)

    def _issued(
        self, event: e.LoadIssued | e.SaveIssued, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation] | None:
        record = step.record
        if record is None or _life(event) == record.life:
            return None
        return self._check_decided(event, step, projections)

    def _tail_issued(
        self, event: e.TailSaveIssued, step: ReplayedEvent, projections: Projections
    ) -> Iterator[Violation] | None:
        return None if step.record is None else self._check_decided(event, step, projections)

    def _settled(
        self,
        event: e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed,
        step: ReplayedEvent,
        projections: Projections,
    ) -> Iterator[Violation] | None:
        job = self._jobs.current
        if job is None or (_life(event) == job.life and step.state_before is step.state_after):
            return None
        return self._check_settled(event, step, projections, job)

    def _check_decided(
        self,
        event: e.LoadIssued | e.SaveIssued | e.TailSaveIssued | e.LookupAnswered,
        step: ReplayedEvent,
        projections: Projections,
    ) -> Iterator[Violation]:
        record = projections.tracker.get(event.request_id)
        if record is None:
            return
        # A tail is always saved from blocks that were just lost, which are those of the generation before.
        allowed = {record.generation - 1} if isinstance(event, e.TailSaveIssued) else {record.generation}
        if isinstance(event, e.SaveIssued) and event.before_forward:
            allowed.add(record.generation - 1)
        if event.ordinal != record.ordinal or event.generation not in allowed:
            detail = f"{event.id} names {_words(_life(event))}, the request is in {_words(record.life)}"
            yield violation(self.rule, step, projections, detail, event.cause)

    def _check_settled(
        self,
        event: e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed,
        step: ReplayedEvent,
        projections: Projections,
        job: InFlight,
    ) -> Iterator[Violation]:
        if _life(event) != job.life:
            detail = (
                f"{event.id} for job {job.job_id} names {_words(_life(event))}, "
                f"the job was issued for {_words(job.life)}"
            )
            yield violation(self.rule, step, projections, detail, job.sequence, event.cause)
        record = projections.tracker.get(event.request_id)
        if record is None or _life(event) == record.life:
            return
        if step.state_before is not step.state_after:
            detail = f"{event.id} of generation {event.generation} moved the request to {step.state_after}"
            yield violation(self.rule, step, projections, detail, job.sequence, event.cause)


def _life(event: e.RequestDecision) -> tuple[str, int, int]:
    return event.request_id, event.ordinal, event.generation


def _words(life: tuple[str, int, int]) -> str:
    request_id, ordinal, generation = life
    return f"generation {generation} of life {ordinal} of {request_id!r}"
