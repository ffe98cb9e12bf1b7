"""GEN_ISOLATION: what belongs to one generation of a request does not reach another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from kvledger.lifecycle import events as e
from kvledger.lifecycle.audit.checker import Violation, violation
from kvledger.lifecycle.audit.model import Model
from kvledger.lifecycle.audit.model.jobs import InFlight, JobsInFlight
from kvledger.lifecycle.audit.model.lives import Life
from kvledger.lifecycle.audit.model.moment import Check, Moment
from kvledger.lifecycle.states import RequestState

_OfAJob = e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed | e.TransferAwaited
_OF_THE_PRESENT = (
    e.LookupAnswered,
    e.LookupDeferred,
    e.LoadIssued,
    e.BlocksHeld,
    e.PrefillAdvanced,
    e.PrefillCompleted,
    e.RequestQuarantined,
)
_Decision = (
    e.LookupAnswered
    | e.LookupDeferred
    | e.LoadIssued
    | e.BlocksHeld
    | e.PrefillAdvanced
    | e.PrefillCompleted
    | e.RequestQuarantined
)
_OfBlocks = e.SaveIssued | e.TailSaveIssued | e.SaveDeclined | e.ChunkEvicted
_PREEMPTED = RequestState.PREEMPTED


class GenIsolation:
    """Jobs are known by their id, and what is decided names the life that it concerns.

    Verifies: what is decided about a job names the life (request, ordinal, generation) it was issued for; every other
    decision the present one; a save of what a preemption took, what it declines and whom it evicts, the one before.
    Does not verify: that an event of another generation leaves the request in its state, which the reference machines
    show that every audit walks along; that the bytes went to the right generation's blocks.
    """

    rule: ClassVar[str] = "GEN_ISOLATION"

    _jobs: JobsInFlight

    def checks(self, model: Model) -> Iterable[tuple[type[e.Event], Check]]:
        """By class of event."""
        self._jobs = model.jobs
        return [
            (e.SaveIssued, self._of_blocks),
            (e.TailSaveIssued, self._of_blocks),
            *((event_class, self._of_the_present) for event_class in _OF_THE_PRESENT),
            (e.SaveDeclined, self._of_blocks),
            (e.ChunkEvicted, self._evicted),
            (e.TransferAwaited, self._awaited),
            (e.LoadCompleted, self._settled),
            (e.LoadFailed, self._settled),
            (e.SaveCompleted, self._settled),
            (e.SaveFailed, self._settled),
        ]

    def _of_the_present(self, event: _Decision, moment: Moment) -> list[Violation] | None:
        life = moment.life
        if life is None or (event.generation == life.generation and event.ordinal == life.ordinal):
            return None
        return self._named_another(event, life, moment)

    def _of_blocks(self, event: _OfBlocks, moment: Moment) -> list[Violation] | None:
        """What is about blocks concerns those that a preemption has just taken, or those that the request has."""
        return None if moment.life is None else self._of_blocks_of(moment.life, event, moment)

    def _evicted(self, event: e.ChunkEvicted, moment: Moment) -> list[Violation] | None:
        life = moment.life_of(event.request_id)
        if life is not None:
            return self._of_blocks_of(life, event, moment)
        detail = f"{event.id} names {_words(_life(event))}, but no request has this id"
        return [violation(self.rule, moment, detail, event.cause)]

    def _of_blocks_of(self, life: Life, event: _OfBlocks, moment: Moment) -> list[Violation] | None:
        if event.ordinal == life.ordinal and event.generation == life.generation - (life.state is _PREEMPTED):
            return None
        return self._named_another(event, life, moment)

    def _named_another(self, event: _Decision | _OfBlocks, life: Life, moment: Moment) -> list[Violation]:
        detail = f"{event.id} names {_words(_life(event))}, the request is in {_words(life.name)}"
        return [violation(self.rule, moment, detail, event.cause)]

    def _awaited(self, event: e.TransferAwaited, moment: Moment) -> list[Violation] | None:
        job = self._jobs.get(event.job_id)
        return None if job is None or _life(event) == job.life else self._of_another_job(event, job, moment)

    def _settled(
        self, event: e.LoadCompleted | e.LoadFailed | e.SaveCompleted | e.SaveFailed, moment: Moment
    ) -> list[Violation] | None:
        job = self._jobs.current
        return None if job is None or _life(event) == job.life else self._of_another_job(event, job, moment)

    def _of_another_job(self, event: _OfAJob, job: InFlight, moment: Moment) -> list[Violation]:
        detail = (
            f"{event.id} for job {job.job_id} names {_words(_life(event))}, the job was issued for {_words(job.life)}"
        )
        return [violation(self.rule, moment, detail, job.sequence, event.cause)]


def _life(event: e.RequestDecision | e.ChunkEvicted) -> tuple[str, int, int]:
    return event.request_id, event.ordinal, event.generation


def _words(life: tuple[str, int, int]) -> str:
    request_id, ordinal, generation = life
    return f"generation {generation} of life {ordinal} of {request_id!r}"
